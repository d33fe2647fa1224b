"""Self-test of executables: calls each one on reproducible inputs and compares with the recorded outputs."""
