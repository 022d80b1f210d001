"""Imported first by the server that workers are forked from: it ends with its launcher, whatever it is doing, and looks
for no garbage while it imports, which takes a fifth of the time and finds nothing.

Left to itself, it would notice that its launcher is gone only once torch is imported, half a minute later on a busy
machine, and until then keep the terminal's pipe open. Only Linux can tell a process so; elsewhere it is late.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys

PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    # Meant for this process alone: those that it forks do not inherit it, and watch their launcher themselves.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

gc.disable()  # until server_last.py
