"""Signing of bundles: Ed25519 signatures over manifests, in DSSE envelopes."""
