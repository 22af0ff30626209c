# SPDX-License-Identifier: Apache-2.0
"""Real servers on a GPU: whether answers are right, and times; no server imports it unasked."""
