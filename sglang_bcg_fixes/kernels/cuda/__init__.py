# SPDX-License-Identifier: Apache-2.0
"""Compile, cache, load and launch the CUDA kernels of csrc/ without nvcc."""
