"""The command lines: the only package that reads flags and the environment."""
