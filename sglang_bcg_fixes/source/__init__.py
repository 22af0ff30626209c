"""The source of one SGLang, read and never imported."""
