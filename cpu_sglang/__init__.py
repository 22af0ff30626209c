"""Real, released SGLang on a machine without a GPU: stand-ins for GPU-only code, and programs that use them."""
