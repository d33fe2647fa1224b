"""The bundle on disk: manifest, signatures, executable store, verification, quarantine, self-tests."""
