"""Emulation of TPU executables: the TPU compiler's optimized programs, made portable and run on a CPU."""
