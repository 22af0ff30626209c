# SPDX-License-Identifier: Apache-2.0
"""Patches any Python package: whole or not at all, written down, read back, and undone exactly."""
