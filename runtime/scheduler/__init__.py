"""Continuous batching: the request queue and the slots of the running batch."""
