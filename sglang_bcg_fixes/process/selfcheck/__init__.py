# SPDX-License-Identifier: Apache-2.0
"""The self-check before the first request: replayed prefills against the same code run eagerly."""
