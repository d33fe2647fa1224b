"""The command lines: the only place that reads flags and the environment."""
