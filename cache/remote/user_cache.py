"""Where the user's caches are."""

import os
from pathlib import Path


def user_cache_directory() -> Path:
    """Ours, in the directory that the XDG specification names."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-aot"
