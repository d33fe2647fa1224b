"""The contract between building and serving: model facts, grid, signatures, bundle, stores. Contains no model code."""
