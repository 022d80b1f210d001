"""``shoal watch``: a live view of a run."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

PORT = 7425


def watch(
    run: Path,
    /,
    *,
    web: Annotated[bool, Parameter(negative=())] = False,
    rank: int = 0,
    once: Annotated[bool, Parameter(negative=())] = False,
    host: str = "127.0.0.1",
    port: int = PORT,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Watch a run: curves, throughput, memory by rank, stragglers, events and the end of a log. Ctrl-C leaves.

    Example: shoal watch runs/tiny

    Example: shoal watch runs/tiny --web

    Reads the run's files and changes nothing, while the run is going or when it is over. The --web page is open to
    this machine alone; with another --host it needs the token in the printed address.

    Parameters
    ----------
    run
        The run directory.
    web
        Serve a page that updates itself, in place of the terminal.
    rank
        Whose log to show in the terminal.
    once
        Print one snapshot and exit.
    host
        With --web: the address to listen on.
    port
        With --web: the port; 0 takes a free one.
    json
        Print one snapshot as a JSON document and exit.
    """
    from shoal.cli.show import print_json
    from shoal.facts.problem import BadInput
    from shoal.launch.screen import Console
    from shoal.report.watch.follow import RunFollower

    if rank < 0:
        raise BadInput(f"--rank {rank}: ranks are counted from 0", "--rank 0")
    if not 0 <= port < 65536:
        raise BadInput(f"--port {port}: there is no such port", f"--port {PORT}")
    follower = RunFollower(run)
    if json:
        from shoal.report.watch.snapshot import snapshot

        found = snapshot(follower)
        print_json({name: value for name, value in found.items() if name not in ("charts", "numbers")})
        return 0
    if web:
        from shoal.report.watch.web import WatchServer

        with WatchServer(follower, host, port) as server:
            print(f"watching {run} at {server.address} (Ctrl-C leaves)", flush=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                return 0
    from shoal.report.watch.terminal import watch as shown

    with contextlib.suppress(KeyboardInterrupt):
        shown(follower, Console(highlight=False), rank, once)
    return 0
