"""Kernels in Triton, a file for each kind of operation."""
