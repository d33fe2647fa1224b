"""Object stores in directories and at URLs: the shared store, and bundles that are pushed and fetched."""
