"""Runs on_eight_devices.py in a subprocess: the number of CPU devices must be set before JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"


def test_tensor_parallelism_on_eight_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).with_name("on_eight_devices.py"))]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT_DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
