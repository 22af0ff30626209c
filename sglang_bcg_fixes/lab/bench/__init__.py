"""Interleaved GPU timings of linear attention layers and whole servers; wrong answers get no time."""
