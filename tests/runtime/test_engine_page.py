"""The code in docs/engine.md runs as it stands there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, encode_manifest, read_manifest

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_code_of_the_engine_page_runs(bundle, speaking_target, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    shutil.copytree(bundle("sampled"), tmp_path / "bundle")
    manifest = read_manifest(tmp_path / "bundle")
    speaking = msgspec.structs.replace(manifest.target, reference=str(speaking_target))
    changed = encode_manifest(msgspec.structs.replace(manifest, target=speaking))
    (tmp_path / "bundle" / MANIFEST_FILE).write_bytes(changed)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "serving" in done.stdout.splitlines()
