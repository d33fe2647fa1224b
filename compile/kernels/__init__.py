"""Pallas TPU kernels of the programs. Other platforms, and shapes that a kernel does not take, use XLA's operations."""
