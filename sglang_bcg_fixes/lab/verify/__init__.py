# SPDX-License-Identifier: Apache-2.0
"""Proof on a GPU: replayed graphs of real servers against the same servers with replay refused."""
