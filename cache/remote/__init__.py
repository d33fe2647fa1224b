"""Object stores behind directories and URLs: shared executables, and bundles that are pushed and fetched."""
