"""The contract between building and serving: grid, signatures, manifest, store. No model code."""
