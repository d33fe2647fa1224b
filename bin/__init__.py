"""The command lines: the only place that reads flags and the environment."""

import gc
import signal
import sys
from pathlib import Path

# A KeyboardInterrupt in the middle of importing jaxlib crashes it (seen on 0.10.2: SIGSEGV). Until a command runs,
# Ctrl-C simply ends its process; `run_command` takes over from there.
if Path(sys.argv[0]).name in ("dflash-precompile", "dflash-run", "dflash-bundle", "dflash-bench"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Half a million objects come with JAX, and stay: looking for garbage among them takes a sixth of all imports.
    gc.disable()
