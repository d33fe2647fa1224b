"""The programs (prefill, draft, verify, kv_write, ...), sampling inside them, and their lowering to StableHLO."""
