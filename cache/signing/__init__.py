"""Signatures over bundle manifests: Ed25519 keys in DSSE envelopes."""
