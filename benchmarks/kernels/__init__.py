"""Kernels written by hand that the study of fusions holds against what a compiler makes: Triton, and CUDA C++."""
