"""CUDA kernels: the byte layout of pages they read, and their compilation at first use."""
