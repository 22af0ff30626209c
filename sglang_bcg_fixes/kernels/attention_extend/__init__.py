# SPDX-License-Identifier: Apache-2.0
"""Attention of an extend inside the captured graph."""
