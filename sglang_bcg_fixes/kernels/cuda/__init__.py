"""Compile, cache, load and launch the CUDA kernels of csrc/ without nvcc."""
