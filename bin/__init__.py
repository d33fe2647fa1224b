"""The command lines: the only package that defines flags."""

import sys

from dflash_aot.bin.console_scripts import prepare_process

if sys.argv[:1] == ["-m"]:  # `python -m dflash_aot.bin.run` imports the package before the command
    prepare_process()
