"""Proof on a GPU: real servers on tiny models, replayed graphs against the same server with replay refused."""
