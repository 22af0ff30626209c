"""A stand-in for SGLang, small enough to see every way that a function can be held."""
