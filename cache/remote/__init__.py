"""Object stores in directories and behind URLs: the shared store, and bundles that are pushed and fetched."""
