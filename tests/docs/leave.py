"""A script on the ranks of torchrun, left without destructors, in which DDP's gloo may abort.

torchrun --nproc-per-node 2 tests/docs/leave.py SCRIPT [arguments of the script]
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    sys.stdout.flush()
    os._exit(0)
