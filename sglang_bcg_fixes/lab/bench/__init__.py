"""Measured on a GPU, in turn: linear attention layers, and whole servers; no time for what answers wrongly."""
