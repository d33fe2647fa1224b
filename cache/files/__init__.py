"""Files: atomic writes, locks, bounded reads, and where bundles and checkpoints lie."""
