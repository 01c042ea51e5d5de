"""Kernels written by hand, in Triton and CUDA C++, that the studies hold against what a compiler makes."""
