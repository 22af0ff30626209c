# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang, small enough to see every way that a function can be held."""
