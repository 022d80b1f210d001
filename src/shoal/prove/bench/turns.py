"""A peer's processes, and how they take their turn."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from shoal.launch.ranks import RankFailed, run_ranks
from shoal.prove.bench.rank import PeerRequest, take_part

# For one turn: the first one builds and compiles, and some stacks build their own extensions.
TURN_SECONDS = 1800.0
# For the whole life of a peer.
LIFE_SECONDS = 24 * 3600.0
LOOK_SECONDS = 0.2


class PeerFailed(RuntimeError):
    """A peer failed during its turn; the message is its error line, ``text`` the whole output."""

    def __init__(self, what: str, text: str = "") -> None:
        self.text = text
        super().__init__(what)


class PeerRanks:
    """One peer's ranks, each a process. They start at once and wait for their first turn."""

    def __init__(self, request: PeerRequest) -> None:
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(request.job.layout.world)]
        self._pipes = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._failure: RankFailed | None = None
        self._thread = threading.Thread(target=self._live, args=(request,), daemon=True)
        self._thread.start()

    def turn(self, steps: int) -> list[dict[str, Any]]:
        """Run this many steps; returns each rank's report."""
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps(steps).encode())
        deadline = time.monotonic() + TURN_SECONDS
        return [json.loads(self._answer(pipe, deadline)) for pipe in self._pipes]

    def end(self) -> None:
        """End the peer; when this returns, what it held is free."""
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps(0).encode())
        self._thread.join()
        self._close()
        if self._failure is not None:
            raise self._failed()

    def _live(self, request: PeerRequest) -> None:
        try:
            run_ranks(request.job.layout.world, take_part, (request, self._theirs), LIFE_SECONDS)
        except RankFailed as failure:
            self._failure = failure

    def _failed(self) -> PeerFailed:
        text = self._failure.text if self._failure is not None else ""
        return PeerFailed(error_line(text), text)

    def _answer(self, pipe: Connection, deadline: float) -> bytes:
        while not wait([pipe], LOOK_SECONDS):
            if not self._thread.is_alive() and not pipe.poll():
                self._close()
                raise self._failed()
            if time.monotonic() > deadline:
                raise PeerFailed(f"no answer within {TURN_SECONDS:.0f} s")
        return pipe.recv_bytes()

    def _close(self) -> None:
        for pipe in (*self._pipes, *self._theirs):
            pipe.close()


def error_line(text: str) -> str:
    """The line of a traceback that names its error: a compiler's last line only says how to see more."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|BadInput|Interrupt)\b", line)]
    return (named or lines or ["its processes ended before their turn did"])[-1]
