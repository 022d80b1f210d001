"""Parameter groups: parameters whose states are sharded over, and replicated on, the same ranks.

The engine makes one reducer for each group; ``predict`` and the planner price the same list. Routed experts are a group
because ``ep`` data ranks hold one set of them together. LoRA's factors are one because they alone are trained.
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
    """Ranks that communicate: what they are called, how many they are, how far apart in rank two neighbours are."""

    name: str
    size: int
    stride: int


class Placement(NamedTuple):
    """Who shares one copy of a parameter's states, and who holds the same shard of other copies."""

    sharded: RankGroup
    replicated: RankGroup


@dataclass(frozen=True)
class ParameterGroup:
    """``zero``: with 1 the optimizer's states are sharded, with 2 gradients too, with 3 parameters as well."""

    name: str
    sharded: RankGroup
    replicated: RankGroup
    zero: Zero
    trained: bool
    offload: tuple[Offload, ...] = ()

    @property
    def fully_sharded(self) -> bool:
        """Whether ranks hold shards of the parameters themselves, as FSDP has them."""
        return self.zero == 3 and self.sharded.size > 1


def experts_fit(ep: int, shards: int) -> bool:
    """Whether the ranks that hold the same experts are evenly spaced, and so can shard and copy them as groups, where
    ``shards`` ranks share one copy of everything else.
    """
    return shards % ep == 0 or ep % shards == 0


@lru_cache(maxsize=8192)
def placement(tp: int, cp: int, fsdp: int, dp: int, ep: int = 1) -> Placement:
    """Of parameters of which ``ep`` data ranks hold one set: 1 for all but routed experts.

    Context ranks shard with the ranks of ``fsdp``. Experts are spread over the ranks of a copy first, and where these
    are not enough over copies. The ranks that hold the same experts shard and copy them (``experts_fit``).
    """
    shards = fsdp * cp
    within = gcd(ep, shards)  # of the ranks of a copy, those that have different experts
    name, rest = "fsdp" if cp == 1 else "fsdp·cp", "/ep" if ep > 1 else ""
    return Placement(
        RankGroup(name + rest, shards // within, tp * within),
        RankGroup("dp" + rest, dp * within // ep, tp * shards * ep // within),
    )


@lru_cache(maxsize=8192)
def parameter_groups(layout: Layout, experts: bool, lora: bool) -> dict[str, ParameterGroup]:
    """The groups of a network, by name. Under ``lora`` all but its factors is frozen."""

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
    """The ranks that exchange activations inside of a block; with ``ep`` all of a stage, for those that hold the same
    experts gather them there.
    """
    if layout.ep > 1:
        return RankGroup("stage", layout.world // layout.pp, 1)
    if layout.cp == 1:
        return RankGroup("tp", layout.tp, 1)
    return RankGroup("cp" if layout.tp == 1 else "cp·tp", layout.cp * layout.tp, 1)


def expert_ranks(layout: Layout) -> RankGroup:
    """Neighbouring data ranks that hold different experts: together one set of them."""
    return RankGroup("ep", layout.ep, layout.tp)


def replica_ranks(layout: Layout) -> RankGroup:
    """The neighbouring ranks that together hold every element of a stage, copies aside."""
    shards = placement(layout.tp, layout.cp, layout.fsdp, layout.dp).sharded
    if layout.tp == 1:
        return shards
    if shards.size == 1:
        return RankGroup("tp", layout.tp, 1)
    return RankGroup(f"{shards.name}·tp", shards.size * layout.tp, 1)


def stage_ranks(layout: Layout) -> RankGroup:
    """All ranks that hold the same stages, copies too."""
    several = [axis for axis in AXES if axis != "pp" and getattr(layout, axis) > 1]
    return RankGroup("·".join(several), layout.world // layout.pp, 1)


MOST_KNOWN = 4096
_COMMUNICATORS: dict[tuple[int, ...], dict[str, RankGroup]] = {}


def communicators(layout: Layout, kv_heads: int) -> dict[str, RankGroup]:
    """Every set of ranks that one rank of a layout may communicate in, by its name. They depend on the degrees alone,
    and a search asks for the same ones many times.
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
        RankGroup("tp copies", tp // kv_heads, 1),  # that share a key/value head
        RankGroup("pp ends", 2, (pp - 1) * stride("pp", layout)),
        RankGroup("control", layout.world, 1),
    ]
    return {one.name: one for one in found}
