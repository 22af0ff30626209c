"""Operations with several implementations: a folder each, whose reference.py, triton.py and cuda.py are alike."""
