# SPDX-License-Identifier: Apache-2.0
"""The source of one SGLang, read and never imported."""
