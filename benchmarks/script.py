"""How the measurements end that are no part of dflash-bench: run by `python -m`, they print a table."""

import sys
from collections.abc import Callable

from dflash_aot.cache.errors import DflashError


def run_script(main: Callable[[], None]) -> int:
    """Its exit code; an error of ours becomes one message."""
    try:
        main()
    except DflashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0
