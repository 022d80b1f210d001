"""Record every collective that this process enters in its flight recorder, at microseconds per call.

A dispatch mode would see them too, but slows every operation down. Instead this wraps the methods of torch's process
groups, through which all of torch's Python functions for collectives go, FSDP2's included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from shoal.facts.collectives import collective
from shoal.facts.traffic import show_ranks
from shoal.observe.flight_recorder import LONGEST_PLACE, Channel, FlightRecorder

# The methods of a process group as of torch 2.11 to 2.13; those that a version lacks are skipped.
METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)

# The description of a group that works in the background at its own pace: a late rank there stalls no step.
BACKGROUND = "shoal-background"

TORCH = str(Path(torch.__file__).parent)
# torch's public entry points: being called through them is not worth reporting.
FRONT_DOOR = (dist.distributed_c10d.__file__, str(Path(dist.__file__).parent / "c10d_logger.py"))


@contextmanager
def recording(flight: FlightRecorder, names: Mapping[str, str]) -> Iterator[None]:
    """Record every collective on entry, within this context. ``names``: our names of groups, by torch's names."""
    recorder = Recorder(flight, names)
    # Read from the class dictionary: getattr returns a plain function, which could not be restored as a method.
    before = {
        method: vars(dist.ProcessGroup)[method] for method in METHODS if method in vars(dist.ProcessGroup)
    }
    for method in before:
        entered = recorder.wrap(collective(method) or method, getattr(dist.ProcessGroup, method))
        setattr(dist.ProcessGroup, method, entered)
    try:
        yield
    finally:
        for method, original in before.items():
            setattr(dist.ProcessGroup, method, original)


class Recorder:
    """Knows this process's groups, and how to describe a call of one of their methods."""

    def __init__(self, flight: FlightRecorder, names: Mapping[str, str]) -> None:
        self.flight = flight
        self.names = names
        # By torch's group name, whether this is a send or a receive, and the peer.
        self._channels: dict[tuple[str, str, int], int | None] = {}
        self._lines: dict[tuple[CodeType, int], bytes] = {}

    def wrap(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        encoded = op.encode()
        direction = op if op in ("send", "receive") else ""

        def entered(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
            key = group.group_name, direction, arguments[1] if direction else 0
            if key not in self._channels:
                beside = group.group_desc == BACKGROUND
                self._channels[key] = None if beside else self.flight.describe(self._channel(group, *key[1:]))
            index = self._channels[key]
            if index is not None:
                # A barrier's arguments only tell which device waits.
                size = 0 if op == "barrier" else max(map(_bytes, arguments[:2]), default=0)
                self.flight.note(index, encoded, size, self._line(sys._getframe(1)))
            return original(group, *arguments, **named)

        return entered

    def _channel(self, group: dist.ProcessGroup, direction: str, peer: int) -> Channel:
        ranks = tuple(dist.get_process_group_ranks(group))
        name = self.names.get(group.group_name) or self._axis_of(ranks) or show_ranks(ranks)
        if not direction:
            return Channel(group.group_name, name, ranks)
        ends = dist.get_rank(), ranks[peer]
        return Channel(group.group_name, name, ends if direction == "send" else ends[::-1], directed=True)

    def _axis_of(self, ranks: tuple[int, ...]) -> str | None:
        """A group that a strategy created itself takes the name of the axis with the same ranks."""
        for known, axis in self.names.items():
            # Only a private function of torch (2.11 to 2.13) finds a group by name.
            resolve: Any = dist.distributed_c10d._resolve_process_group
            if axis != "world" and tuple(dist.get_process_group_ranks(resolve(known))) == ranks:
                return axis
        return None

    def _line(self, frame: FrameType | None) -> bytes:
        """The innermost line outside torch; autograd threads may have none, then the line of torch's caller."""
        caller: FrameType | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(TORCH):
                caller = frame
                break
            if caller is None and file not in FRONT_DOOR:
                caller = frame
            frame = frame.f_back
        if caller is None:
            return b""
        key = caller.f_code, caller.f_lineno
        if key not in self._lines:
            # The end of a long path says more than its beginning.
            self._lines[key] = f"{caller.f_code.co_filename}:{caller.f_lineno}".encode()[-LONGEST_PLACE:]
        return self._lines[key]


def _bytes(value: Any) -> int:
    if type(value) is list:
        return sum(map(_bytes, value))
    size: int = getattr(value, "nbytes", 0)
    return size
