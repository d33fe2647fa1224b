"""Requests: sampling parameters, the request builder, streams of deltas."""
