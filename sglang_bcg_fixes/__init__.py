# SPDX-License-Identifier: Apache-2.0
"""Fixes for breakable CUDA graphs in released SGLang, applied to exactly the defects that the installed source has."""

__version__ = "0.1.0"
