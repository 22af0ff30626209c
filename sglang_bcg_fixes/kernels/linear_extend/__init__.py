# SPDX-License-Identifier: Apache-2.0
"""Shared by all linear layers whose extend is captured: tables, convolution, and how a server is served."""
