"""``--links``: measured link rates from a file, for the planned cluster.

The file holds output of nccl-tests (``all_reduce_perf`` and its like, one log or several), or rates stored by ``shoal
bench comm``. A log says how many ranks on how many hosts took part; one host measures the fast link, several the
network.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal.facts import calibration
from shoal.facts.calibration import LinkRates
from shoal.facts.calibration.file import StoredLinks
from shoal.facts.cluster import Cluster, devices
from shoal.facts.input.untrusted_files import first_fault, read_bytes
from shoal.facts.problem import BadInput
from shoal.predict.time.link_fit import OperationFit, TimedCollective, bus_share, fit_operations
from shoal.predict.time.links import ROUNDS, Links

WANTED = (
    "the output of nccl-tests (all_reduce_perf -b 4K -e 1G -f 4 …), or a file that shoal bench comm stored"
)

# ``#  Rank  3 Group  0 Pid  316 on worker-0 device  3 [0x5d] NVIDIA H100 80GB HBM3``; older ones have no group.
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
# ``size count type redop root time algbw busbw error``: operations without reduction may have no redop, older logs no
# root.
_HEADER = re.compile(r"#\s+size\s+count\s+type\b.*\bbusbw\b")
_NUMBER = r"(\d+(?:\.\d+)?)"
_FIRST = r"(?:^|\s)(\d+)\s+\d+\s+[a-z]\w*\s+(?:([a-z]+)\s+)?"
_ROWS = {
    rooted: re.compile(_FIRST + (r"-?\d+\s+" if rooted else "") + rf"{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s")
    for rooted in (True, False)
}
_NAME = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoall|sendrecv)_perf\b")
_OURS = {"alltoall": "all_to_all", "sendrecv": "send"}


@dataclass(frozen=True)
class LinkLog:
    """One log: its ranks and its timings."""

    hosts: tuple[str, ...]  # of every rank
    device: str
    calls: tuple[TimedCollective, ...]

    @property
    def nodes(self) -> int:
        return len(set(self.hosts))


def use_links(path: Path, cluster: Cluster) -> None:
    """Make predictions for this cluster's device kind use the file's rates from now on."""
    try:
        text = read_bytes(path).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise BadInput(f"--links {path}: cannot be read: {error}", WANTED) from None
    name = cluster.device.name
    if text.lstrip().startswith("{"):
        stored = _stored(path, text)
        _same_device(path, stored.device, name)
        calibration.install_links(name, stored.fast, stored.network, str(path))
        return
    logs = [log for log in read_logs(text) if log.calls]
    if not logs:
        raise BadInput(f"--links {path}: no table of nccl-tests between two ranks or more is in it", WANTED)
    for log in logs:
        _same_device(path, log.device, name)
    fast, network = [log for log in logs if log.nodes == 1], [log for log in logs if log.nodes > 1]
    within = within_a_node(fast, str(path)) if fast else None
    between = between_nodes(network, cluster, str(path)) if network else None
    calibration.install_links(name, within, between, str(path))


def read_logs(text: str) -> Iterator[LinkLog]:
    """Each rank 0 line starts a new log; its operation is the last one named before it, if any."""
    hosts: list[str] = []
    calls: list[TimedCollective] = []
    device, named, upcoming, rooted = "", None, None, True
    for line in text.splitlines():
        if _HEADER.search(line):
            rooted = "root" in line
        if (found := _NAME.search(line)) and "concluded" not in line:
            upcoming = _OURS.get(found[1], found[1])
        if rank := _RANK.search(line):
            if int(rank[1]) == 0:
                if hosts:
                    yield LinkLog(tuple(hosts), device, tuple(calls))
                hosts, calls, named, upcoming = [], [], upcoming, None
            hosts.append(rank[2])
            device = rank[3]
        elif "#" not in line and len(hosts) > 1 and (row := _ROWS[rooted].search(line)):
            size, microseconds = int(row[1]), float(row[3])
            op = named or _operation(row[2], float(row[4]), float(row[5]), len(hosts))
            if size and microseconds and op:
                calls.append(TimedCollective(op, len(hosts), size, microseconds * 1e-6))
    if hosts:
        yield LinkLog(tuple(hosts), device, tuple(calls))


def _operation(reduced: str | None, algorithm: float, bus: float, ranks: int) -> str | None:
    """The operation of a row, inferred from the ratio of its two bandwidths if the log does not say."""
    if not algorithm:
        return None
    share = bus / algorithm
    summed = reduced not in (None, "none")
    likely = ("all_reduce", "reduce_scatter", "reduce") if summed else ("all_gather", "broadcast")
    return min(likely, key=lambda op: abs(bus_share(op, ranks) - share))


def within_a_node(logs: list[LinkLog], source: str) -> LinkRates:
    """Rates of the link between devices of a node."""
    fits = [fit for log in logs for fit in fit_operations(log.calls).values()]
    slower = statistics.median(_slower(fit, calibration.FAST) for fit in fits)
    return calibration.FAST.model_copy(
        update={
            "share": 1.0,
            "bandwidth": statistics.median(fit.bandwidth for fit in fits),
            "start": slower * calibration.FAST.start,
            "hop": slower * calibration.FAST.hop,
            "source": source,
        }
    )


def between_nodes(logs: list[LinkLog], cluster: Cluster, source: str) -> LinkRates:
    """Rates of the network: what a whole node reaches, whichever of its devices took part."""
    known = calibration.find(cluster)
    bandwidths, slower = [], []
    for log in logs:
        near = len(log.hosts) // log.nodes
        used = min(near, cluster.nics) / min(cluster.devices_per_node, cluster.nics)
        for fit in fit_operations(log.calls).values():
            bandwidths.append(fit.bandwidth / min(1.0, used))
            # The network's part of the latency is what the links inside a node do not explain.
            built_in = Links(cluster, known).seconds(fit.op, 1, log.nodes * near, 1)
            slower.append(fit.latency / built_in)
    times = statistics.median(slower)
    return known.network.model_copy(
        update={
            "share": 1.0,
            "bandwidth": statistics.median(bandwidths),
            "start": times * known.network.start,
            "hop": times * known.network.hop,
            "source": source,
        }
    )


def _slower(fit: OperationFit, built_in: LinkRates) -> float:
    """A measured latency relative to the built-in rates' prediction."""
    passes = ROUNDS.get(fit.op, 1.0) * (fit.ranks - 1 if fit.op in ROUNDS else 1)
    return fit.latency / (built_in.start + passes * built_in.hop)


def _stored(path: Path, text: str) -> StoredLinks:
    try:
        return StoredLinks.model_validate_json(text)
    except ValidationError as error:
        fault = first_fault(error)
        raise BadInput(f"--links {path}: not what shoal bench comm stores: {fault}", WANTED) from None


def _same_device(path: Path, measured: str, planned: str) -> None:
    known = devices.find(measured)
    if (known.name if known else measured) != planned:
        raise BadInput(
            f"--links {path}: measured between {measured}, not {planned}",
            f"a file of {planned}, or --on a cluster of {known.name if known else measured}",
        )
