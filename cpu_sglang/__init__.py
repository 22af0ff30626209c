"""Real, released SGLang on a machine without a GPU: stand-ins for what only a GPU has, and programs that use them."""
