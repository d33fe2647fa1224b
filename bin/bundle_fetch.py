"""Bundles from behind a URL, with a bar when it takes a while."""

import sys
from pathlib import Path

from tqdm import tqdm

from dflash_aot.cache.remote.fetch import fetch_bundle


def fetch_with_progress(url: str, signed_by: Path | None) -> Path:
    """See `fetch_bundle`."""
    with tqdm(desc="fetching", unit="B", unit_scale=True, delay=1, leave=False, file=sys.stderr) as bar:

        def observe(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return fetch_bundle(url, signed_by, observe)
