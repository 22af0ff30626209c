# SPDX-License-Identifier: Apache-2.0
"""Decisions: pure functions of fixes, settings and source."""
