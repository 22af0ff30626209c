# SPDX-License-Identifier: Apache-2.0
"""Interleaved GPU timings of linear attention layers and whole servers; wrong answers get no time."""
