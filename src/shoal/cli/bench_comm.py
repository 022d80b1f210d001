"""``shoal bench comm``: latency and bandwidth of collectives on the current process group."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.show import print_columns, print_json, unwritable

if TYPE_CHECKING:
    from shoal.comm.operations import TimedCollective
    from shoal.comm.ring import ShownRing
    from shoal.facts.cluster import Cluster
    from shoal.facts.cluster.devices import Link
    from shoal.predict.time.link_fit import OperationFit
    from shoal.prove.calibrate.links import AdoptedRanks, StartedRanks

OPERATIONS = (
    "send",
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)
SHOWN = ("ring",)
# By transport: from 4 KiB in steps of four.
SIZES = {"gloo": [2**12 << 2 * step for step in range(7)], "nccl": [2**12 << 2 * step for step in range(9)]}
LARGEST = 8 * 2**30
MOST_RANKS = 64
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
BAR = 24


def comm(
    *,
    on: str = "local",
    nproc: int | None = None,
    operations: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)] = None,
    sizes: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)] = None,
    share: Annotated[bool, Parameter(negative=())] = False,
    show: str | None = None,
    store: bool = True,
    picture: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Measure collectives between ranks: bandwidth by size, and the latency and bandwidth that fit them.

    Example: shoal bench comm --nproc 4 --operations all_reduce,send --sizes 4K,1M,16M --picture comm.svg

    Ranks are started on this machine: NCCL between its GPUs, gloo between processes on a CPU. Under torchrun the ranks
    found there are adopted, on one node or several. Bandwidths are those of nccl-tests, next to the catalogue's link.
    The fit is stored where plan, train and profile read it.

    Parameters
    ----------
    on
        The devices to measure between: local, or 4xcpu for processes on the CPU.
    nproc
        How many ranks: by default one for each GPU, or two on a CPU.
    operations
        Names separated by commas; by default all: send (point-to-point), broadcast, reduce, all_reduce, all_gather,
        reduce_scatter, all_to_all.
    sizes
        Bytes of the largest buffer, separated by commas, as in 4K,1M,64M.
    share
        Let ranks share a GPU. Nothing is stored, since that does not measure a link.
    show
        ring: a ring all-reduce on send and receive, step by step, in place of measurements.
    store
        Keep the fit for predictions.
    picture
        Draw the curves to this SVG file.
    json
        Print one JSON document on standard output, everything else on standard error.
    """
    from shoal.facts.cluster import notation
    from shoal.launch.adopt.launched_rank import torchrun_rank

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cluster = notation.find(on, visible)
    backend = "gloo" if cluster.device.name == "cpu" else "nccl"
    wanted = _operations(operations)
    bytes_each = _sizes(sizes, backend)
    told = torchrun_rank()
    world = _world(cluster, nproc, share, show) if told is None else told.world
    _check(show, world, bytes_each, picture, _memory(cluster, world))

    from shoal.prove.calibrate.links import AdoptedRanks, StartedRanks

    ranks = StartedRanks(world, backend, share) if told is None else AdoptedRanks(told, backend)
    if show is not None:
        return _ring(ranks, json)
    return _measured(ranks, cluster, wanted, bytes_each, store and not share, picture, json)


def _operations(given: list[str] | None) -> list[str]:
    from shoal.facts.problem import BadInput, Problem, did_you_mean

    if given is None:
        return [*OPERATIONS]
    names = [name.strip().replace("-", "_") for words in given for name in words.split(",") if name.strip()]
    if not names:
        raise BadInput("--operations is empty", f"--operations {','.join(OPERATIONS)}")
    problems = [
        Problem(f"--operations {name}: no such operation", did_you_mean(name, OPERATIONS))
        for name in names
        if name not in OPERATIONS
    ]
    if problems:
        raise BadInput(problems)
    return [*dict.fromkeys(names)]


def _sizes(given: list[str] | None, backend: str) -> list[int]:
    from shoal.facts.problem import BadInput, Problem

    if given is None:
        return SIZES[backend]
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    if not words:
        raise BadInput("--sizes is empty", "--sizes 4K,1M,16M")
    found, problems = [], []
    for word in words:
        match = re.fullmatch(r"(\d{1,12})([KMG]?)(i?B)?", word, re.IGNORECASE)
        size = int(match[1]) * UNITS[match[2].upper()] if match else 0
        if not 4 <= size <= LARGEST:
            problems.append(
                Problem(f"--sizes {word[:40]}: not a size between 4 bytes and 8 GiB", "--sizes 4K,1M,16M")
            )
        found.append(size)
    if problems:
        raise BadInput(problems)
    return sorted(set(found))


def _world(cluster: Cluster, nproc: int | None, share: bool, show: str | None) -> int:
    """The number of ranks to start; raises with all problems of the request."""
    from shoal.facts.cluster import this_machine
    from shoal.facts.problem import BadInput

    on_cpu = cluster.device.name == "cpu"
    usual = (4 if show else 2) if on_cpu and cluster.devices == 1 else cluster.devices
    world = usual if nproc is None else nproc
    if not 1 <= world <= MOST_RANKS:
        raise BadInput(f"--nproc {world}: not a number of ranks from 2 to {MOST_RANKS}", "--nproc 2")
    if on_cpu:
        return world
    here = this_machine.look(os.environ.get("CUDA_VISIBLE_DEVICES"))
    there = 0 if here.device.name == "cpu" else here.devices
    if world > there and not (share and there):
        fix = "--on 2xcpu for processes on the CPU" if there < 2 else f"--nproc {there}"
        more = ", or --share for ranks that share a GPU" if there else ""
        raise BadInput(
            f"{world} ranks with a GPU each: this machine has {there} {'GPU' if there == 1 else 'GPUs'}",
            fix + more,
        )
    return world


def _memory(cluster: Cluster, world: int) -> int:
    """Bytes that each rank may use: of its GPU, or its share of this machine's memory."""
    from shoal.facts.cluster.this_machine import machine_memory

    if cluster.device.name != "cpu":
        return cluster.device.memory_bytes
    return machine_memory() // max(1, world)


def _check(show: str | None, world: int, sizes: list[int], picture: Path | None, memory: int) -> None:
    from shoal.facts.problem import BadInput, Problem, did_you_mean

    problems = []
    if show is not None and show not in SHOWN:
        problems.append(Problem(f"--show {show}: nothing of that name to show", did_you_mean(show, SHOWN)))
    if world == 1:
        problems.append(
            Problem("one rank has no other to send to", "--nproc 2, or --on 2xcpu for processes on the CPU")
        )
    if small := [size for size in sizes if size < 4 * world]:
        problems.append(
            Problem(
                f"--sizes {small[0]}: less than one fp32 value for each of {world} ranks",
                f"--sizes {4 * world}",
            )
        )
    # An all-to-all has two whole buffers, and the transport copies as well.
    if (most := max(sizes)) * 4 > memory:
        problems.append(
            Problem(
                f"--sizes {most}: a rank has {memory / 2**30:.1f} GiB, and needs four times its largest buffer",
                f"--sizes {2 ** (memory // 4).bit_length() // 2}",
            )
        )
    problems += unwritable([picture.expanduser()] if picture is not None else [])
    if problems:
        raise BadInput(problems)


def _measured(
    ranks: StartedRanks | AdoptedRanks,
    cluster: Cluster,
    operations: list[str],
    sizes: list[int],
    store: bool,
    picture: Path | None,
    json: bool,
) -> int:
    from shoal.comm import picture as pictures
    from shoal.facts.calibration import file
    from shoal.launch.report import FINISHED
    from shoal.predict.time.link_fit import PRICED, fit_operations, link_rates
    from shoal.prove.calibrate.links import described, keep

    calls = ranks.measure(operations, sizes)
    if not ranks.prints:
        return FINISHED
    fits = fit_operations(calls)
    kind, link = _link(cluster, ranks.nodes)
    rates = link_rates(calls, described(ranks))
    stored = None
    if store and rates is not None:
        stored = keep(file.default_folder(), cluster.device.name, kind, rates)
    title = f"{described(ranks)}, {cluster.device.name}"
    if picture is not None:
        text = pictures.svg(calls, fits, title, link.bandwidth, link.kind)
        picture.expanduser().write_text(text, "utf-8")
    if json:
        print_json(
            {
                "backend": ranks.backend,
                "ranks": ranks.world,
                "nodes": ranks.nodes,
                "device": cluster.device.name,
                "link": link.model_dump(),
                "calls": [_call(call) for call in calls],
                "fits": [vars(fit) for fit in fits.values()],
                "rates": None if rates is None else rates.model_dump(),
                "stored": None if stored is None else str(stored),
            }
        )
        return FINISHED
    print(title)
    _show(calls, fits, link)
    if rates is not None:
        print(
            f"the planner's link: {_rate(rates.bandwidth or 0)}, {(rates.start + rates.hop) * 1e6:.3g} µs to the "
            f"next rank ({rates.start * 1e6:.3g} µs a call and {rates.hop * 1e6:.3g} µs a rank)"
        )
    if stored is not None:
        print(f"stored in {stored}")
    elif store:
        print(f"not stored: a link's fit takes two sizes and the operations {', '.join(PRICED)}")
    return FINISHED


def _link(cluster: Cluster, nodes: int) -> tuple[str, Link]:
    """The catalogue's link between these ranks, with the name under which the planner looks it up."""
    if nodes > 1:
        return "network", cluster.network
    return "fast", cluster.fast or cluster.device.host_link


def _call(call: TimedCollective) -> dict[str, Any]:
    both = {"algorithm_bandwidth": call.algorithm_bandwidth, "bus_bandwidth": call.bus_bandwidth}
    return {**call._asdict(), **both}


def _show(calls: list[TimedCollective], fits: dict[str, OperationFit], link: Link) -> None:
    from shoal.comm.picture import short_size

    most = max(call.bus_bandwidth for call in calls)
    rows: list[tuple[str, ...]] = [("operation", "bytes", "time", "algorithm", "bus", "of the link", "")]
    for op, fit in fits.items():
        for call in calls:
            if call.op == op:
                rows.append(
                    (
                        op,
                        short_size(call.bytes),
                        _seconds(call.seconds),
                        _rate(call.algorithm_bandwidth),
                        _rate(call.bus_bandwidth),
                        f"{call.bus_bandwidth / link.bandwidth:.1%}",
                        "█" * round(BAR * call.bus_bandwidth / most),
                    )
                )
        fitted = f"fit, {fit.worst:.0%} off at worst"
        share = f"{fit.bandwidth / link.bandwidth:.1%}"
        rows.append((f"  {fitted}", "", _seconds(fit.latency), "", _rate(fit.bandwidth), share, ""))
    print_columns(rows)
    print(f"the catalogue's link: {link.kind}, {_rate(link.bandwidth)}, {_seconds(link.latency)}")


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _ring(ranks: StartedRanks | AdoptedRanks, json: bool) -> int:
    from shoal.launch.report import FAILED, FINISHED

    every = ranks.show_ring()
    exact = 2 * (ranks.world - 1) * every[0].buffer_bytes // ranks.world
    fine = all(one.equal and one.sent_bytes == exact for one in every)
    if ranks.prints and json:
        print_json(
            {
                "ranks": ranks.world,
                "buffer_bytes": every[0].buffer_bytes,
                "sent_bytes": [one.sent_bytes for one in every],
                "formula_bytes": exact,
                "equal": all(one.equal for one in every),
                "steps": [[step._asdict() for step in one.steps] for one in every],
            }
        )
    elif ranks.prints:
        _show_ring(every, exact)
    return FINISHED if fine else FAILED


def _show_ring(every: list[ShownRing], exact: int) -> None:
    from shoal.comm.ring import parts

    ranks = len(every)
    print(f"ring all-reduce of {ranks} ranks: each has {ranks} chunks; a cell says whose parts are in a sum")
    for number in range(len(every[0].steps)):
        steps = [one.steps[number] for one in every]
        print(f"\n{steps[0].phase}, step {steps[0].step + 1} of {ranks - 1}")
        rows = [("rank", "sends", "receives", *(f"chunk {chunk}" for chunk in range(ranks)))]
        for rank, step in enumerate(steps):
            cells = (
                f"{'*' if chunk == step.received else ' '}{'+'.join(map(str, parts(value)))}"
                for chunk, value in enumerate(step.chunks)
            )
            sends = f"chunk {step.sent} to {(rank + 1) % ranks}"
            receives = f"chunk {step.received} from {(rank - 1) % ranks}"
            rows.append((str(rank), sends, receives, *cells))
        print_columns(rows)
    sent = sorted({one.sent_bytes for one in every})
    same = "equal to" if all(one.equal for one in every) else "DIFFERENT from"
    print(
        f"\n* received in this step. Sent by each rank: {' or '.join(map(str, sent))} bytes; "
        f"2·({ranks}-1)/{ranks} of its {every[0].buffer_bytes}: {exact}. The result is {same} the library's sum."
    )
