"""Read a torch.profiler trace and classify its intervals by kind of work.

Both kinds of devices give the same result. On a GPU, work is its kernels, each classified by the operator that
launched it. On a CPU, work is what the stepping thread does inside torch's operators, so its waits are idle time.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.facts.strategies import PIPELINE
from shoal.observe import kinds
from shoal.observe.intervals import Interval

# Ranges that the code names itself, with torch.profiler.record_function.
STEP, INPUT = "shoal step", "shoal input"
# Around every instruction of the schedule: "shoal F0.3" is the forward of stage 0 and micro-batch 3.
PREFIX = "shoal "

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_ON_HOST = frozenset({"cpu_op", "user_annotation"})
_NODE_OF_AUTOGRAD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Span:
    """One event of a trace, in seconds."""

    name: str
    category: str
    start: float
    end: float
    thread: object = 0
    correlation: int = 0  # links a kernel to the call that launched it
    recorded: bool = False  # an operator that autograd has recorded for a later backward pass
    group: str = ""  # torch's name for the ranks of an NCCL collective


@dataclass(frozen=True)
class Computation:
    """An interval in which the device computes."""

    start: float
    end: float
    kind: str
    issued: float  # when the host reached it
    repeated: bool = False  # recomputed inside a backward pass


@dataclass(frozen=True)
class Communication:
    """An interval in which ranks communicate."""

    start: float
    end: float
    operation: str
    group: str  # the layout's axis; empty if the trace does not tell


@dataclass(frozen=True)
class Recording:
    """A rank's step, classified."""

    step: Interval
    waiting_for_input: list[Interval]
    work: list[Computation]
    talks: list[Communication]
    instructions: dict[str, Interval]  # on the host's timeline
    kernels: bool  # whether work means GPU kernels


def read(path: Path) -> list[Span]:
    """The spans of a compressed Chrome trace, as ``export_chrome_trace`` writes it."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return spans(json.load(file))


def spans(trace: dict[str, Any]) -> list[Span]:
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
    return [_span(event, base) for event in trace["traceEvents"] if event.get("ph") == "X" and "cat" in event]


def _span(event: dict[str, Any], base: float) -> Span:
    start = base + float(event["ts"]) / 1e6
    details = event.get("args", {})
    return Span(
        name=str(event["name"]),
        category=str(event["cat"]),
        start=start,
        end=start + float(event.get("dur", 0)) / 1e6,
        thread=event.get("tid"),
        correlation=int(details.get("correlation", 0)),
        # Nodes of a backward pass carry the thread of their forward pass; operators of a forward pass carry 0.
        recorded="Sequence number" in details and details.get("Fwd thread id") == 0,
        group=str(details.get("Process Group Name", "")),
    )


def sort_out(
    every: Iterable[Span], names: Mapping[str, str] | None = None, purposes: Mapping[str, str] | None = None
) -> Recording:
    """Everything from the start of the one ``STEP`` range to its end.

    ``names``: what torch calls the groups of ranks, and the layout's names for them. ``purposes``: why ranks
    communicate there.
    """
    every = list(every)
    (step,) = [span for span in every if span.name == STEP and span.category == "user_annotation"]
    inside = [span for span in every if span.end > step.start and span.start < step.end]
    named = [span for span in inside if span.category == "user_annotation"]
    on_device = [span for span in inside if span.category in _ON_DEVICE]
    hosts = _frames([span for span in inside if span.category in _ON_HOST])
    launches = {span.correlation: span for span in inside if span.category in _LAUNCHES}
    if on_device:
        work = [
            _kernel_work(span, launches.get(span.correlation), hosts)
            for span in on_device
            if not kinds.is_collective(span.name)
        ]
    else:
        work = _host_work(hosts[step.thread])
    instructions = {
        span.name.removeprefix(PREFIX): (span.start, span.end)
        for span in named
        if span.name.startswith(PREFIX) and span.name not in (STEP, INPUT)
    }

    def between_stages(span: Span) -> bool:
        """Decided by the group; gloo records none, but a computation sends nothing between stages."""
        if not kinds.is_message(span.name):
            return False
        if purposes and span.group in purposes:
            return purposes[span.group] == PIPELINE
        issued = launches.get(span.correlation, span).start
        at = (name for name, (start, end) in instructions.items() if start <= issued < end)
        return next(at, "")[:1] in ("S", "R")

    # A message between stages is in flight from the moment it is awaited, so it does not show who waits.
    talking = [span for span in (*named, *on_device) if kinds.is_collective(span.name)]
    calls = [] if on_device else [span for span in inside if kinds.talks(span.name)]
    talking, calls = ([span for span in spans if not between_stages(span)] for spans in (talking, calls))
    talks = [
        Communication(span.start, span.end, operation, _group(span, names or {}, bool(on_device)))
        for span, operation in _called(talking, calls)
    ]
    return Recording(
        step=(step.start, step.end),
        waiting_for_input=[(span.start, span.end) for span in named if span.name == INPUT],
        work=work,
        talks=talks,
        instructions=instructions,
        kernels=bool(on_device),
    )


def _called(talking: list[Span], calls: list[Span]) -> list[tuple[Span, str]]:
    """Every collective with the operation that was called.

    gloo implements reduce-scatter by reducing whole tensors, and names its range after that; but it processes calls in
    order. It also copies what it sends, on the calling thread and before its range begins.
    """
    talking, calls = (sorted(spans, key=lambda span: span.start) for spans in (talking, calls))
    named = calls if len(calls) == len(talking) else talking
    ranges = [(span, kinds.operation(call.name)) for span, call in zip(talking, named, strict=True)]
    return ranges + [(call, kinds.operation(call.name)) for call in calls]


def _group(span: Span, names: Mapping[str, str], on_gpu: bool) -> str:
    if span.group in names:
        return names[span.group]
    if on_gpu:
        # gloo then carries only what hosts agree on.
        return "world" if span.name.startswith("gloo:") else ""
    axes = set(names.values()) - {"world"}
    return axes.pop() if len(axes) == 1 else ""


@dataclass(frozen=True)
class _HostStretch:
    """An interval of a host thread, and what the operators on its stack say about it."""

    start: float
    end: float
    kind: str | None  # None: outside torch's operators
    in_backward: bool = False
    in_loss: bool = False  # in the backward node where the loss begins
    again: bool = False  # inside a part of the forward pass that the backward pass recomputes

    @property
    def repeated(self) -> bool:
        """A loss computed in chunks always recomputes them; that is how it works, not the layout's recomputation."""
        return self.again and not self.in_loss


def _frames(on_host: list[Span]) -> dict[object, list[_HostStretch]]:
    """Every thread's time, split where an operator begins or ends; a frame is the innermost operator's own time."""
    threads: dict[object, list[Span]] = defaultdict(list)
    for span in on_host:
        # These would extend over later operators.
        if not kinds.outlives_its_call(span.name):
            threads[span.thread].append(span)
    return defaultdict(list, {thread: _cut(events) for thread, events in threads.items()})


def _cut(events: list[Span]) -> list[_HostStretch]:
    frames: list[_HostStretch] = []
    stack: list[_HostStretch] = []
    reached = 0.0

    def advance(until: float) -> None:
        """Assign the time up to ``until`` to the top of the stack, and pop what has ended."""
        nonlocal reached
        while stack:
            top = stack[-1]
            end = min(until, top.end)
            if end > reached:
                frames.append(replace(top, start=reached, end=end))
                reached = end
            if top.end > until:
                break
            stack.pop()
        reached = max(reached, until)

    for span in sorted(events, key=lambda span: (span.start, -span.end)):
        advance(span.start)
        stack.append(_inside(stack[-1] if stack else None, span))
    advance(float("inf"))
    return frames


def _inside(outer: _HostStretch | None, span: Span) -> _HostStretch:
    outer = outer or _HostStretch(span.start, span.end, None)
    in_backward = outer.in_backward or span.name.startswith(_NODE_OF_AUTOGRAD)
    in_loss = outer.in_loss or (in_backward and kinds.is_node_of_loss(span.name))
    # A backward pass records nothing, unless it recomputes a part of the forward pass.
    again = outer.again or (in_backward and span.recorded)
    # Within the node that requested it, recomputation has a kind of its own.
    around = outer.kind if again == outer.again else None
    if span.category == "user_annotation" or kinds.talks(span.name):
        # A range opened by Python is not device work, and an operator that communicates waits for others.
        kind = None
    else:
        kind = around if around != kinds.MEMORY_BOUND else None
        kind = kind or kinds.of_operator(span.name)
        if kind is None and (around or kinds.computes(span.name)):
            kind = kinds.MEMORY_BOUND
    return _HostStretch(span.start, span.end, kind, in_backward, in_loss, again)


def _host_work(frames: list[_HostStretch]) -> list[Computation]:
    return [
        Computation(frame.start, frame.end, frame.kind, frame.start, frame.repeated)
        for frame in frames
        if frame.kind is not None
    ]


def _kernel_work(kernel: Span, launch: Span | None, hosts: dict[object, list[_HostStretch]]) -> Computation:
    frame = _at(hosts[launch.thread], launch.start) if launch else None
    issued = launch.start if launch else kernel.start
    if kernel.category == "gpu_memcpy" and ("HtoD" in kernel.name or "DtoH" in kernel.name):
        kind = kinds.COPIES
    elif frame is not None and frame.kind not in (None, kinds.MEMORY_BOUND):
        kind = frame.kind or kinds.MEMORY_BOUND
    else:
        kind = kinds.of_kernel(kernel.name) or kinds.MEMORY_BOUND
    return Computation(kernel.start, kernel.end, kind, issued, frame is not None and frame.repeated)


def _at(frames: list[_HostStretch], moment: float) -> _HostStretch | None:
    place = bisect_right(frames, moment, key=lambda frame: frame.start) - 1
    return frames[place] if place >= 0 and moment <= frames[place].end else None
