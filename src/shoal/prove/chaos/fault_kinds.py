"""Kinds of faults: what they hit, at which points of a step, and what the run must report.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shoal.observe.flight_recorder import COMMIT, EVALUATE, INPUT, RESTORE, START, STEP

# Points between those that a rank announces, found by hooks.
FORWARD, BACKWARD, UPDATE, WRITE, RENAME = "forward", "backward", "update", "write", "rename"
POINTS = (INPUT, STEP, FORWARD, BACKWARD, UPDATE, EVALUATE, COMMIT, WRITE, RENAME)
IN_RECOVERY = (START, RESTORE)

Target = Literal["rank", "launcher", "node", "one node", "checkpoint", "network"]


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault. ``told``: the kinds in faults.jsonl that report it; empty if nothing is reported."""

    name: str
    target: Target
    told: tuple[str, ...]
    points: tuple[str, ...] = POINTS
    weight: int = 1  # relative frequency
    words: str = ""  # part of the row's message
    least_world: int = 1
    least_nodes: int = 1
    whose: Literal["rank", "peers", "none"] = "rank"  # which rank the row has to name


# Points where peers will wait for a rank that does not arrive, or wait inside the call.
WAITED_FOR = (STEP, FORWARD, BACKWARD, UPDATE)

KINDS = (
    # A rank dies.
    FaultKind("SIGKILL", "rank", ("killed",), weight=5, words="SIGKILL"),
    FaultKind("SIGSEGV", "rank", ("killed",), weight=3, words="SIGSEGV"),
    FaultKind("SIGTERM", "rank", ("killed",), weight=2, words="SIGTERM"),
    FaultKind("SIGABRT", "rank", ("killed",), weight=2, words="SIGABRT"),
    FaultKind("loader crash", "rank", ("error",), (STEP,), 2, "loader"),
    FaultKind("out of memory", "rank", ("oom",), (STEP,), 2),
    # A rank does not arrive.
    FaultKind("SIGSTOP", "rank", ("stall",), WAITED_FOR, 2, "stopped", 2),
    FaultKind("hang", "rank", ("stall",), WAITED_FOR, 2, "", 2),
    FaultKind("hang with the lock", "rank", ("stall",), WAITED_FOR, 1, "", 2),
    FaultKind("closed connections", "rank", ("connection",), WAITED_FOR, 2, "", 2, whose="peers"),
    FaultKind("network cut", "network", ("stall", "connection"), WAITED_FOR, 1, "", 2, whose="none"),
    # A rank computes wrong numbers.
    FaultKind("NaN in a gradient", "rank", ("nonfinite",), (STEP,), 2),
    FaultKind("bit flip in a weight", "rank", ("corruption",), (STEP, FORWARD, INPUT), 2),
    FaultKind("clock jump", "rank", (), POINTS, 2),
    # Storage.
    FaultKind("disk full", "rank", ("commit failed",), (STEP,), 2, "full", whose="none"),
    FaultKind("flipped bit", "checkpoint", ("damaged checkpoint",), (RESTORE,), 2, "BLAKE3"),
    FaultKind("truncated file", "checkpoint", ("damaged checkpoint",), (RESTORE,), 2, "bytes"),
    FaultKind("swapped files", "checkpoint", ("damaged checkpoint",), (RESTORE,), 2),
    FaultKind("missing file", "checkpoint", ("damaged checkpoint",), (RESTORE,), 2, "missing"),
    FaultKind("torn manifest", "checkpoint", ("damaged checkpoint",), (RESTORE,), 2, "manifest"),
    # The launcher, and everything on its machine.
    FaultKind("launcher SIGKILL", "launcher", ("launcher lost",), whose="none"),
    FaultKind("launcher SIGSEGV", "launcher", ("launcher lost",), whose="none"),
    FaultKind("launcher SIGTERM", "launcher", (), whose="none"),
    FaultKind("launcher SIGUSR1", "launcher", (), whose="none"),
    FaultKind("launcher SIGSTOP", "launcher", (), whose="none"),
    FaultKind("node SIGKILL", "node", ("launcher lost",), whose="none"),
    FaultKind("node SIGTERM", "node", (), whose="none"),
    # One of several nodes, which comes back: any node may be killed, but only followers are stopped, because no
    # launcher could take the lock from a stopped leader.
    FaultKind("one node SIGKILL", "one node", ("node lost", "launcher lost"), least_nodes=2, whose="none"),
    FaultKind("one node SIGSTOP", "one node", ("node lost",), least_nodes=2, whose="none"),
)
BY_NAME = {kind.name: kind for kind in KINDS}

# Kinds after which a launcher has to be restarted, possibly in another layout.
ENDS_LAUNCHER = tuple(
    kind.name for kind in KINDS if kind.target in ("launcher", "node") and kind.name != "launcher SIGSTOP"
)


def named_right(kind: FaultKind, rank: int, rows: list[dict[str, Any]], node: str = "") -> bool | None:
    """Whether a row of faults.jsonl reports a fault with the right rank or node; None: nothing should be reported."""
    if not kind.told:
        return None
    for row in rows:
        if row["kind"] not in kind.told or kind.words not in str(row.get("message", "")) + str(
            row.get("action", "")
        ):
            continue
        if row.get("node", node) != node:
            continue
        named = row.get("ranks") or [row.get("rank")]
        if kind.whose != "rank" or kind.target == "checkpoint" or rank in named:
            return True
    return False
