"""Ways to damage a file, and manifests whose damage their digest does not show."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def seal(facts: Any) -> bytes:
    """Encodes a manifest with a correct digest, independently of the project's writer."""
    blank = json.dumps({**facts, "digest": ""}, indent=1, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return blank.replace('"digest": ""', f'"digest": "{digest}"').encode()
