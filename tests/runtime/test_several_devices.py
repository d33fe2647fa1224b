"""Runs on_eight_devices.py in a process of its own: how many devices a CPU is must be said before JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

EIGHT = "--xla_force_host_platform_device_count=8"


def test_what_needs_several_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).with_name("on_eight_devices.py"))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {EIGHT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
