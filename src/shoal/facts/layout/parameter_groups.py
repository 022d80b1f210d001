"""Parameter groups: parameters whose states are sharded over and replicated on the same ranks.

The engine creates one reducer per group; ``predict`` and the planner price the same list. Routed experts form a
group because ``ep`` data ranks hold one set of them together. LoRA's factors form one because only they are
trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from shoal.facts.layout import Layout, Offload, Zero
from shoal.facts.layout.ranks import AXES, stride
from shoal.facts.model.parameters import Parameter

DENSE, EXPERTS, ADAPTERS = "dense", "experts", "adapters"


class RankGroup(NamedTuple):
    """A process group: its name, its size, and the distance in rank between neighbours."""

    name: str
    size: int
    stride: int


class Placement(NamedTuple):
    """The ranks that shard one copy of a parameter's states, and the ranks that replicate the same shard."""

    sharded: RankGroup
    replicated: RankGroup


@dataclass(frozen=True)
class ParameterGroup:
    """``zero=1`` shards optimizer states, 2 also gradients, 3 also parameters."""

    name: str
    sharded: RankGroup
    replicated: RankGroup
    zero: Zero
    trained: bool
    offload: tuple[Offload, ...] = ()

    @property
    def fully_sharded(self) -> bool:
        """Whether the parameters themselves are sharded, as in FSDP."""
        return self.zero == 3 and self.sharded.size > 1


def experts_fit(ep: int, shards: int) -> bool:
    """Whether the ranks with the same experts are evenly spaced, and so can form shard and replica groups.
    ``shards``: ranks that shard one copy of all other parameters.
    """
    return shards % ep == 0 or ep % shards == 0


@lru_cache(maxsize=8192)
def placement(tp: int, cp: int, fsdp: int, dp: int, ep: int = 1) -> Placement:
    """The placement of parameters of which ``ep`` data ranks together hold one set; ``ep`` is 1 for all but routed
    experts.

    Context ranks shard along with the ranks of ``fsdp``. Experts spread over the ranks of one replica first, then
    over replicas if those are not enough. The ranks that hold the same experts shard and replicate them
    (``experts_fit``).
    """
    shards = fsdp * cp
    within = gcd(ep, shards)  # ranks of one replica that have different experts
    name, rest = "fsdp" if cp == 1 else "fsdp·cp", "/ep" if ep > 1 else ""
    return Placement(
        RankGroup(name + rest, shards // within, tp * within),
        RankGroup("dp" + rest, dp * within // ep, tp * shards * ep // within),
    )


@lru_cache(maxsize=8192)
def parameter_groups(layout: Layout, experts: bool, lora: bool) -> dict[str, ParameterGroup]:
    """The parameter groups of a network, by name. Under ``lora`` only its factors are trained."""

    def group(name: str, ep: int, trained: bool) -> ParameterGroup:
        placed = placement(layout.tp, layout.cp, layout.fsdp, layout.dp, ep)
        return ParameterGroup(name, *placed, layout.zero, trained, layout.offload)

    found = [group(DENSE, 1, not lora)]
    found += [group(EXPERTS, layout.ep, not lora)] if experts else []
    found += [group(ADAPTERS, 1, True)] if lora else []
    return {one.name: one for one in found}


def group_name(parameter: Parameter) -> str:
    """The group that a parameter belongs to."""
    return {"expert": EXPERTS, "adapter": ADAPTERS}.get(parameter.kind, DENSE)


def meeting_in_blocks(layout: Layout) -> RankGroup:
    """The ranks that exchange activations inside a block. With ``ep`` these are all ranks of the stage, because
    ranks that hold the same experts gather their shards inside the block.
    """
    if layout.ep > 1:
        return RankGroup("stage", layout.world // layout.pp, 1)
    if layout.cp == 1:
        return RankGroup("tp", layout.tp, 1)
    return RankGroup("cp" if layout.tp == 1 else "cp·tp", layout.cp * layout.tp, 1)


def expert_ranks(layout: Layout) -> RankGroup:
    """Neighbouring data ranks that together hold one set of experts, each rank a different part."""
    return RankGroup("ep", layout.ep, layout.tp)


def replica_ranks(layout: Layout) -> RankGroup:
    """The neighbouring ranks that together hold one replica of a stage."""
    shards = placement(layout.tp, layout.cp, layout.fsdp, layout.dp).sharded
    if layout.tp == 1:
        return shards
    if shards.size == 1:
        return RankGroup("tp", layout.tp, 1)
    return RankGroup(f"{shards.name}·tp", shards.size * layout.tp, 1)


def stage_ranks(layout: Layout) -> RankGroup:
    """All ranks that hold the same stages, replicas included."""
    several = [axis for axis in AXES if axis != "pp" and getattr(layout, axis) > 1]
    return RankGroup("·".join(several), layout.world // layout.pp, 1)


MOST_KNOWN = 4096
_COMMUNICATORS: dict[tuple[int, ...], dict[str, RankGroup]] = {}


def communicators(layout: Layout, kv_heads: int) -> dict[str, RankGroup]:
    """Every group that one rank of a layout may communicate in, by name. Depends on the degrees alone, so a search
    hits the cache often.
    """
    key = (*(getattr(layout, axis) for axis in AXES), layout.ep, kv_heads)
    known = _COMMUNICATORS.get(key)
    if known is None:
        if len(_COMMUNICATORS) >= MOST_KNOWN:
            _COMMUNICATORS.clear()
        known = _COMMUNICATORS[key] = _communicators(layout, kv_heads)
    return known


def _communicators(layout: Layout, kv_heads: int) -> dict[str, RankGroup]:
    tp, pp = layout.tp, layout.pp
    found = [
        *(RankGroup(axis, getattr(layout, axis), stride(axis, layout)) for axis in AXES),
        *placement(tp, layout.cp, layout.fsdp, layout.dp),
        *placement(tp, layout.cp, layout.fsdp, layout.dp, layout.ep),
        expert_ranks(layout),
        replica_ranks(layout),
        stage_ranks(layout),
        RankGroup("tp copies", tp // kv_heads, 1),  # ranks that share a key/value head
        RankGroup("pp ends", 2, (pp - 1) * stride("pp", layout)),
        RankGroup("control", layout.world, 1),
    ]
    return {one.name: one for one in found}
