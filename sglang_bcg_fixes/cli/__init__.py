# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes`: commands for people; no server imports them."""
