"""``python -m shoal.launch.jobs.tied PARENT COMMAND…``: run a command that is killed when its parent dies.

A Ray worker that dies, because its node was removed, cannot end what it started. A launcher that outlived it would go
on training on a node that is no longer ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Linux's prctl: the signal that a process gets when its parent dies. It survives exec.
PR_SET_PDEATHSIG = 1


def main(parent: int, words: list[str]) -> None:
    # Not SIGTERM: a launcher would treat it as a request to stop the run on all nodes.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        sys.exit(1)
    os.execvp(words[0], words)  # noqa: S606


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
