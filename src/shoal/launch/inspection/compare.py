"""Compare the nodes' reports: the majority is presumed right, and nodes that differ are named. Needs no torch."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.launch.inspection.node import UNLIMITED, NodeReport

# Seconds between a node's clock and the others'.
LARGEST_SKEW = 1.0
# Fractions of the median node's bandwidth, and of the catalogue's.
SLOW, BELOW_CATALOGUE = 0.6, 0.5
# Load per core above which a node's programs wait for each other.
BUSY = 1.5
# Nodes that differ in these cannot train together; other differences are allowed, and may explain much.
MUST_AGREE = ("Shoal", "torch", "CUDA", "NCCL")
# Tolerance between memory sizes of identical machines: firmware reserves different amounts.
ALIKE = 0.03


@dataclass(frozen=True)
class ClusterCheck:
    """The result of one check over all nodes."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    fix: str = ""
    nodes: tuple[str, ...] = ()  # nodes it is about; none: all nodes equally


@dataclass
class Seen:
    """What a node sees of the others."""

    shared: str = ""  # why it does not see the first node's run directory
    locked: bool = True  # whether the first node's lock is effective there
    unreached: dict[str, str] = field(default_factory=dict)  # why it cannot reach a partner


@dataclass
class Inspected:
    """All reports of the nodes."""

    expected: int
    reports: dict[int, NodeReport]
    offsets: dict[int, tuple[float, float]] = field(default_factory=dict)  # clock offset, and its uncertainty
    seen: dict[int, Seen] = field(default_factory=dict)
    links: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by device
    names: dict[int, str] = field(default_factory=dict)  # of nodes that did not come, if known

    def name(self, node: int) -> str:
        return self.reports[node].name if node in self.reports else self.names.get(node, f"number {node}")


def compare(heard: Inspected, shared: bool, inside: float, network: float) -> list[ClusterCheck]:
    """``shared``: nodes should share the run directory. ``inside``, ``network``: bytes/s that the catalogue expects."""
    return [
        *_present(heard),
        *_versions(heard),
        *_hardware(heard),
        *_limits(heard),
        *_own(heard),
        *_loads(heard),
        *_clocks(heard),
        *(_shared(heard) if shared else ()),
        *_ports(heard),
        *_links(heard, inside, network),
    ]


def outliers(checks: list[ClusterCheck], nodes: int) -> list[str]:
    """Nodes to leave out: those that failed checks name, if they are a minority."""
    found = {name for check in checks if check.status == "failed" for name in check.nodes}
    return sorted(found) if 2 * len(found) < nodes else []


def _present(heard: Inspected) -> Iterator[ClusterCheck]:
    missing = [node for node in range(heard.expected) if node not in heard.reports]
    if missing:
        names = tuple(heard.name(node) for node in missing)
        said = f"{' '.join(names)} of {heard.expected} did not come, or had nothing to say"
        yield ClusterCheck("nodes", "failed", said, "is Shoal there, and is the first node reached?", names)
    else:
        yield ClusterCheck("nodes", "ok", " ".join(report.name for report in heard.reports.values()))


def _odd(values: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The nodes' values in words, most frequent first, and the names of those that differ from the majority."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, value in values.items():
        groups[value].append(name)
    order = sorted(groups.items(), key=lambda item: -len(item[1]))
    words = "; ".join(f"{value or 'none'} on {' '.join(names)}" for value, names in order[1:])
    most, names = order[0]
    said = f"{most or 'none'}" if len(order) == 1 else f"{words}; {most or 'none'} on {_few(names)}"
    majority = 2 * len(names) > len(values)
    return said, tuple(name for _, rest in order[1:] for name in rest) if majority else ()


def _few(names: list[str]) -> str:
    return " ".join(names) if len(names) < 5 else f"the other {len(names)}"


def _versions(heard: Inspected) -> Iterator[ClusterCheck]:
    reports = heard.reports.values()
    alike = []
    for what in dict.fromkeys(key for report in reports for key in report.versions):
        values = {report.name: report.versions.get(what, "") for report in reports}
        said, odd = _odd(values)
        if len(set(values.values())) == 1:
            alike.append(f"{what} {said}")
        else:
            status: Literal["failed", "warning"] = "failed" if what in MUST_AGREE else "warning"
            yield ClusterCheck(what, status, said, "the same version on all nodes", odd)
    if alike:
        yield ClusterCheck("versions", "ok", ", ".join(alike))


def _hardware(heard: Inspected) -> Iterator[ClusterCheck]:
    reports = heard.reports.values()
    devices = {
        report.name: f"{report.devices} x {report.device}" if report.devices else "no accelerator"
        for report in reports
    }
    said, odd = _odd(devices)
    if len(set(devices.values())) == 1:
        yield ClusterCheck("devices", "ok", f"{said} on each")
    else:
        fix = "nvidia-smi and dmesg there: a device may have fallen off the bus, or another job has it"
        yield ClusterCheck("devices", "failed", said, fix, odd)
    for what, values in (
        ("device memory", {report.name: report.memory for report in reports}),
        ("host memory", {report.name: report.host_memory for report in reports}),
        ("cores", {report.name: float(report.cores) for report in reports}),
    ):
        middle = statistics.median(values.values())
        less = tuple(name for name, value in values.items() if value < middle * (1 - ALIKE))
        if less:
            each = ", ".join(f"{values[name]:g} on {name}" for name in less)
            unit = "" if what == "cores" else " GiB"
            fix = "as much on all nodes: the least of them limits the run"
            yield ClusterCheck(what, "warning", f"{each}; the median is {middle:g}{unit}", fix, less)


def _limits(heard: Inspected) -> Iterator[ClusterCheck]:
    reports = heard.reports.values()
    for what in dict.fromkeys(key for report in reports for key in report.limits):
        values = {report.name: report.limits.get(what, 0) for report in reports}
        usual = Counter(values.values()).most_common(1)[0][0]
        less = tuple(name for name, value in values.items() if value < usual)
        if less and 2 * len(less) < len(values):
            each = ", ".join(f"{values[name]} on {name}" for name in less)
            usually = "unlimited" if usual >= UNLIMITED else str(usual)
            fix = "the same in /etc/security/limits.conf, or in the unit of the scheduler's daemon"
            yield ClusterCheck(f"limit of {what}", "warning", f"{each}; {usually} elsewhere", fix, less)


def _own(heard: Inspected) -> Iterator[ClusterCheck]:
    """What ``shoal doctor`` reports on each node; nodes with the same result share a line."""
    found: dict[tuple[str, str], list[tuple[str, dict[str, str]]]] = defaultdict(list)
    for report in heard.reports.values():
        for check in report.checks:
            found[check["name"], check["status"]].append((report.name, check))
    for (name, status), said in found.items():
        names = tuple(node for node, _ in said)
        where = "all nodes" if len(names) == len(heard.reports) else " ".join(names)
        worst: Literal["failed", "warning"] = "failed" if status == "failed" else "warning"
        yield ClusterCheck(name, worst, f"{where}: {said[0][1]['detail']}", said[0][1]["fix"], names)
    if not found:
        yield ClusterCheck("each node by itself", "ok", "shoal doctor finds nothing there")


def _busy(heard: Inspected) -> list[int]:
    """Nodes where more processes want to run than there are cores."""
    return [node for node, report in heard.reports.items() if report.load > BUSY * report.cores]


def _share_taken(report: NodeReport) -> float:
    """How much faster its CPUs would sum without the other load there. GPUs do not wait for it."""
    return 1.0 if report.devices else max(1.0, report.load / report.cores)


def _loads(heard: Inspected) -> Iterator[ClusterCheck]:
    if not (busy := _busy(heard)):
        yield ClusterCheck("load", "ok", "no more than there are cores")
        return
    each = ", ".join(
        f"{heard.reports[node].load:g} on {heard.reports[node].cores} cores of {heard.name(node)}"
        for node in busy
    )
    fix = "top there: another job, or processes that one has left behind"
    yield ClusterCheck("load", "warning", f"{each} over the last minute", fix, tuple(map(heard.name, busy)))


def _clocks(heard: Inspected) -> Iterator[ClusterCheck]:
    if len(heard.offsets) < 2:
        return
    middle = statistics.median(offset for offset, _ in heard.offsets.values())
    away = {node: offset - middle for node, (offset, _) in heard.offsets.items()}
    # Subtract the uncertainty that the message's travel time causes.
    sure = {node: abs(away[node]) - heard.offsets[node][1] for node in away}
    odd = [node for node, seconds in sure.items() if seconds > LARGEST_SKEW]
    if odd:
        each = ", ".join(f"{heard.name(node)} by {away[node]:+.1f} s" for node in odd)
        fix = "synchronise them with NTP, such as chronyd"
        yield ClusterCheck("clocks", "failed", f"differ: {each}", fix, tuple(map(heard.name, odd)))
    else:
        most = max(map(abs, away.values()))
        yield ClusterCheck("clocks", "ok", f"within {most * 1e3:.0f} ms")


def _shared(heard: Inspected) -> Iterator[ClusterCheck]:
    if len(heard.seen) < 2:
        return
    blind = [node for node, seen in heard.seen.items() if seen.shared]
    free = [node for node, seen in heard.seen.items() if not seen.shared and not seen.locked]
    if blind:
        names = tuple(map(heard.name, blind))
        fix = "--run on a file system that all nodes share; or checkpoint.to and --no-shared"
        yield ClusterCheck("shared directory", "failed", heard.seen[blind[0]].shared, fix, names)
    if free:
        names = tuple(map(heard.name, free))
        said = f"a lock of the first node does not hold on {' '.join(names)}"
        fix = "mount it with locks for the whole cluster: NFS 4 without nolock, Lustre with flock"
        yield ClusterCheck("locks", "failed", said, fix, names)
    if not blind and not free:
        yield ClusterCheck("shared directory", "ok", "seen by all nodes, with the first one's lock")


def _ports(heard: Inspected) -> Iterator[ClusterCheck]:
    if len(heard.seen) < 2:
        return
    # By unreached node, then by the node that tried.
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for node, seen in heard.seen.items():
        for other, why in seen.unreached.items():
            found[int(other)][node] = why
    # A node that several cannot reach, or that reaches none, is at fault; otherwise it is the link between two.
    pairs = {frozenset((node, other)) for other, nodes in found.items() for node in nodes}
    times = Counter(node for pair in pairs for node in pair)
    fix = "open the ports of that interface between nodes (firewall, security group); or name another: --interface"
    while pairs:
        worst, count = times.most_common(1)[0]
        mine = {pair for pair in pairs if worst in pair}
        others = sorted(heard.name(node) for pair in mine for node in pair if node != worst)
        why = next(
            (why for node in found for asker, why in found[node].items() if worst in (node, asker)), ""
        )
        said = f"{heard.name(worst)} and {' '.join(others)} do not reach each other: {why}"
        yield ClusterCheck("ports", "failed", said, fix, (heard.name(worst),) if count > 1 else ())
        pairs -= mine
        times = Counter(node for pair in pairs for node in pair)
    if not found:
        yield ClusterCheck("ports", "ok", "partners reach each other")


def _links(heard: Inspected, inside: float, network: float) -> Iterator[ClusterCheck]:
    troubles = [
        (node, key, why)
        for node, ranks in heard.links.items()
        for rank in ranks
        for key, why in rank["trouble"].items()
    ]
    if troubles:
        node, key, why = troubles[0]
        other = {"": "its own devices", "all": "all others"}.get(key) or heard.name(int(key))
        said = f"{heard.name(node)} and {other} could not sum: {why}"
        yield ClusterCheck("links", "failed", said, "NCCL_DEBUG=INFO there says more")
    own = {
        node: min(rank["inside"] for rank in ranks)
        for node, ranks in heard.links.items()
        if ranks and all(rank["inside"] for rank in ranks)
    }
    yield from _rated("links inside a node", heard, own, inside, "nvidia-smi nvlink --status there")
    # A node counts with its best partner, because others may be the slow one; and with its slowest device.
    best = {
        node: min(max(rank["pairs"].values()) for rank in ranks)
        for node, ranks in heard.links.items()
        if ranks and all(rank["pairs"] for rank in ranks)
    }
    fix = "its adapter, cable and switch port: ethtool, ibstat; is it the interface that was meant?"
    yield from _rated("links between nodes", heard, best, network, fix)
    together = [rank["together"] for ranks in heard.links.values() for rank in ranks if rank["together"]]
    if together:
        said = f"{rate_in_words(min(together))} on the bus, {len(together)} ranks"
        yield ClusterCheck("all-reduce of all", "ok", said)


def _rated(
    name: str, heard: Inspected, rates: Mapping[int, float], catalogue: float, fix: str
) -> Iterator[ClusterCheck]:
    if not rates:
        return
    middle = statistics.median(rates.values())
    slow = [node for node, rate in rates.items() if rate < SLOW * middle]
    share = f"{middle / catalogue:.0%} of the catalogue's {rate_in_words(catalogue)}"
    # With only two nodes, it is unknown which of them is slow.
    if slow and len(rates) > 2:
        each = ", ".join(f"{rate_in_words(rates[node])} on {heard.name(node)}" for node in slow)
        said = f"{each}; the median node has {rate_in_words(middle)}, {share}"
        # CPUs sum only while they have their cores: if load explains the slowness, the link is not blamed.
        kept = [node for node in slow if rates[node] * _share_taken(heard.reports[node]) >= SLOW * middle]
        verdict: Literal["warning", "failed"] = "warning" if kept == slow else "failed"
        yield ClusterCheck(name, verdict, said, fix, tuple(map(heard.name, slow)))
        return
    status: Literal["ok", "warning"] = "warning" if middle < BELOW_CATALOGUE * catalogue else "ok"
    yield ClusterCheck(name, status, f"{rate_in_words(middle)}, {share}", fix if status == "warning" else "")


def rate_in_words(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
