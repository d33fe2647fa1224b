"""The command lines: the only package that defines flags."""
