# SPDX-License-Identifier: Apache-2.0
"""Real, released SGLang without a GPU: stand-ins for GPU-only code, and programs that use them."""
