"""Loaded executables: bundle loading, lazy loading, dispatch, the device state, the compile guard."""
