"""The bundle on disk: manifest, executable store, verification, quarantine, garbage collection."""
