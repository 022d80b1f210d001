"""First import of the fork server: makes it end with its launcher, and disables garbage collection during imports,
which would take a fifth of the time and find nothing.

Otherwise the server would notice a dead launcher only after torch is imported, half a minute later on a busy machine,
and keep the terminal's pipe open until then. Only Linux can signal a parent's death; elsewhere the server ends late.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys

PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    # For this process only: forked workers do not inherit it, and watch their launcher themselves.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

gc.disable()  # until server_last.py
