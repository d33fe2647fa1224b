"""Model configs: reads a checkpoint's `config.json` into the facts that executables depend on."""
