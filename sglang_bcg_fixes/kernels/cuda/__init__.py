"""How the CUDA kernels under csrc/ get onto the GPU, without a compiler of the user's."""
