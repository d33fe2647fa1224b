"""Counters of the engine and their Prometheus metrics."""
