"""What one SGLang looks like, read and never imported."""
