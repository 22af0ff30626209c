# SPDX-License-Identifier: Apache-2.0
"""Real servers on a GPU: whether answers are right; no server imports it unasked."""
