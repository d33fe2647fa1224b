"""Metrics of an engine: counters, latency histograms, and their Prometheus form."""
