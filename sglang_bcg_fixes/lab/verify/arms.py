# SPDX-License-Identifier: Apache-2.0
"""Names of the servers that a case is tried on, and that are compared with each other."""

from __future__ import annotations

REFERENCE, STOCK, PATCHED, ALONE, EAGER = "reference", "stock", "patched", "alone", "eager"
# no fix but the self-check, which must notice defects unaided
CHECKED = "checked"
# not chosen by name: added where it can explain a difference
PADDED = "padded"
ARMS = (STOCK, PATCHED, ALONE, CHECKED, EAGER)
