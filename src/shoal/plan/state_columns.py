"""Who keeps which states, of many layouts at once, as columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shoal.facts.layout import Offload, Zero
from shoal.facts.layout.offload import waiting
from shoal.facts.layout.parameter_groups import placement
from shoal.plan.space import NOTHING, ModelSplit, Space, StateSharding
from shoal.predict.time.offload import Shares


class StateColumns:
    """In the order in which they are given. ``kind``: which of ``kinds`` it is, whatever is offloaded."""

    def __init__(self, cp: int, ep: int, states: Iterable[StateSharding]) -> None:
        self.states = list(states)
        numbers: dict[tuple[int, int, Zero], int] = {}
        offloads: dict[int, int] = {}
        parts: list[tuple[Offload, ...]] = []
        kind, owner = [], []
        for one in self.states:
            kind.append(numbers.setdefault(one[:3], len(numbers)))
            if id(one.offload) not in offloads:
                offloads[id(one.offload)] = len(parts)
                parts.append(one.offload)
            owner.append(offloads[id(one.offload)])
        self.kinds = [StateSharding(*one) for one in numbers]
        self.offloads = parts
        self.kind, self.owner = np.array(kind), np.array(owner)
        # By kind.
        self.ranks = np.array([placement(1, cp, one.fsdp, one.dp).sharded.size for one in self.kinds])
        self.expert_ranks = np.array(
            [placement(1, cp, one.fsdp, one.dp, ep).sharded.size for one in self.kinds]
        )
        self.zero = np.array([one.zero for one in self.kinds])
        self.copies = np.array([one.dp > 1 for one in self.kinds])
        # By what is offloaded: how much of optimizer, parameters and activations.
        found = [[waiting(one, what) for what in Shares._fields] for one in parts]
        self.away = np.array([[part.fraction if part else 0.0 for part in one] for one in found])
        self.in_files = np.array([any(part.nvme for part in one) for one in parts])

    def __len__(self) -> int:
        return len(self.states)

    def greatest(self, allowed: NDArray[np.bool_]) -> int | None:
        """Of the offloads that are allowed, the one that leaves no more of anything than any other, if there is one."""
        most = int(np.where(allowed, self.away.sum(axis=1), -1.0).argmax())
        return most if (self.away[most] >= self.away[allowed]).all() else None


class StateTables:
    """All ways to keep states in a space, made once for every number of ranks."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._all: dict[tuple[int, int, int], StateColumns] = {}
        self._frugal: dict[tuple[int, int, int], StateColumns] = {}

    def every(self, split: ModelSplit, ep: int) -> StateColumns:
        """With all that may be offloaded."""
        key = split.data, split.cp, ep
        if key not in self._all:
            offloads, space = (NOTHING, *self.space.offloads), self.space
            states = (one for offload in offloads for one in space.states(split, ep, offload))
            self._all[key] = StateColumns(split.cp, ep, states)
        return self._all[key]

    def frugal(self, split: ModelSplit, ep: int) -> StateColumns:
        """States over as many ranks as there are need the least, whichever of them are shared out."""
        key = split.data, split.cp, ep
        if key not in self._frugal:
            zeros: tuple[Zero, ...] = (3, 2, 1) if split.data * split.cp > 1 else (3,)
            offloads = (NOTHING, *self.space.offloads)
            states = (StateSharding(1, split.data, zero, offload) for offload in offloads for zero in zeros)
            self._frugal[key] = StateColumns(split.cp, ep, states)
        return self._frugal[key]
