"""Build pipeline: `precompile` finds or compiles the executables of a bundle, self-tests them and publishes it."""
