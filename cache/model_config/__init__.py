"""Reads a checkpoint's `config.json` into the facts that executables depend on, or refuses it by name."""
