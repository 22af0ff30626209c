"""Proof on a GPU: replayed graphs of real servers against the same servers with replay refused."""
