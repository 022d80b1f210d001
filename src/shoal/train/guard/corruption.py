"""Silent corruption of live state: flipped bits, devices that compute wrongly, broken copies.

Two checks. At rest: nothing may change weights or optimizer states between two updates, so digests are taken after an
update and again before the next. Across ranks: what several ranks hold alike (replicas, copies of norms and key/value
heads in a tensor group, both ends of a tied embedding, whole parameters where only states are sharded) must be
bit-equal. Every rank learns of a mismatch and raises the same error before anything is updated or committed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shoal.facts.model.parameters import EMBEDDING, Parameter, by_name
from shoal.facts.model.tensor_split import tensor_part
from shoal.facts.traffic import name_ranks
from shoal.parallel.shards import Shard
from shoal.train.guard.digest import BLOCK, Digests, digest, prepare
from shoal.train.step import Step

WEIGHT, MASTER, UPDATES = "weight", "master weight", "update count"

# Tensors that are compared together. Copies are replicated on other ranks than the rest, so they are compared
# separately; so are routed experts, which fewer ranks share, and a tied embedding, which a rank may hold twice. Weights
# may be whole while optimizer states are sharded.
SETS = ("own", "experts", "copies", "shared heads", "embedding", "second embedding")
SLOTS = {key: number for number, key in enumerate(product(SETS, (True, False)))}

MOST_NAMED = 3


class Corrupted(Exception):
    """The live state is wrong. Raised on every rank with the same message.

    ``step`` is the last completed step. States after ``trusted`` and up to it may be corrupted, so a run should not
    resume from a commit of one of them.
    """

    def __init__(
        self, message: str, step: int, ranks: Sequence[int], names: Sequence[str], trusted: int
    ) -> None:
        super().__init__(message)
        self.step, self.ranks, self.names, self.trusted = step, tuple(ranks), tuple(names), trusted

    def row(self) -> dict[str, Any]:
        """As a row of faults.jsonl."""
        return {
            "kind": "corruption",
            "step": self.step,
            "rank": self.ranks[0],
            "ranks": list(self.ranks),
            "parameters": list(self.names),
            "trusted_step": self.trusted,
            "message": str(self),
            "action": f"commits after step {self.trusted} are not trusted",
        }


@dataclass(frozen=True, eq=False)
class GuardedTensor:
    """A tensor of the live state, and which elements of which parameter it is."""

    state: str
    name: str
    elements: tuple[Any, ...]  # ranks with equal values here hold the same data
    kept_as: str
    values: Tensor
    read: Callable[[], Tensor] | None = None  # reads the values, if they are in a file

    @property
    def key(self) -> str:
        return repr((self.state, self.name, self.elements))

    @property
    def words(self) -> str:
        return self.state if self.state == UPDATES else f"{self.state} of {self.name}"


class CorruptionGuard:
    """One rank's part. All ranks must call the same methods in the same order."""

    def __init__(self, step: Step, every: int, done: int) -> None:
        """``every``: steps between checks, 0 for none. ``done``: the step of the initial state, which is trusted."""
        self.placed, self.optimizer, self.mesh = step.placed, step.optimizer, step.mesh
        self.every = every
        self.trusted = done
        self._taken: tuple[int, Digests] | None = None
        if every:
            prepare(self.mesh.device)

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def after_step(self, step: int) -> None:
        """Call when a step is over, before its state is committed: compare with other ranks and remember digests."""
        kept = list(self._live())
        found = self._digest(kept)
        self._compare(step, kept, found.totals.tolist())
        self._taken = step, found

    def before_update(self) -> Digests | None:
        """Call when only the update of a step is left: check that nothing changed since the last update.

        Returns the current digests if earlier ones were remembered.
        """
        if self._taken is None:
            return None
        step, before = self._taken
        self._taken = None
        kept = list(self._live())
        now = self._digest(kept)
        same = torch.equal(before.blocks, now.blocks)
        (broken,) = self.mesh.hosts.sum_integers([int(not same)])
        if broken:
            self._report_change(step, kept, before, now)
        # Only now: until here a copy for a commit could have changed before it was made.
        self.trusted = step
        return now

    def confirm(self, step: int) -> None:
        """Call when the step's state has been copied for a commit: it is unchanged so far, so the copy is good.

        Later changes cast no doubt on that commit.
        """
        found = self.before_update()
        assert found is not None
        self._taken = step, found

    def _digest(self, kept: list[GuardedTensor]) -> Digests:
        """Digests; states in files are read as copies, one at a time."""
        here = digest([one.values for one in kept if one.read is None], self.mesh.device)
        if all(one.read is None for one in kept):
            return here
        mine = zip(here.blocks.split(here.counts), here.counts, here.totals, strict=True)
        every = []
        for one in kept:
            if one.read is None:
                every.append(next(mine))
            else:
                found = digest([one.read()], self.mesh.device)
                every.append((found.blocks, found.counts[0], found.totals[0]))
        blocks, counts, totals = zip(*every, strict=True)
        return Digests(torch.cat(blocks), counts, torch.stack(totals))

    # At rest.

    def _report_change(self, step: int, kept: list[GuardedTensor], before: Digests, now: Digests) -> None:
        mine = [
            (one.words, one.name, _location(one.values, changed))
            for one, changed in zip(kept, before.changed_blocks(now), strict=True)
            if changed
        ]
        found = {rank: rows for rank, rows in enumerate(self._everyones(mine)) if rows}
        told = [
            f"rank {rank}: {_listed([f'{words} ({where})' for words, _, where in rows])}"
            for rank, rows in found.items()
        ]
        raise Corrupted(
            f"after the update of step {step} and before the next one, memory was corrupted on {'; '.join(told)}",
            step,
            list(found),
            _names(name for rows in found.values() for _, name, _ in rows),
            self.trusted,
        )

    # Across ranks.

    def _compare(self, step: int, kept: list[GuardedTensor], totals: list[int]) -> None:
        mine = self._signatures(kept, totals)
        everyones = self.mesh.hosts.all_gather_values(mine).view(-1, 2)
        # Ranks that hold the same elements must hold the same bits: no two neighbours of the sorted pairs may share the
        # first number.
        elements = torch.unique(everyones[everyones[:, 0] != 0], dim=0)[:, 0]
        differing = set(elements[1:][elements[1:] == elements[:-1]].tolist())
        if differing:
            self._report_difference(step, kept, totals, mine, differing)

    def _signatures(self, kept: list[GuardedTensor], totals: list[int]) -> Tensor:
        """Two numbers per set: a hash of which elements it has, and one of their values. Zeros for an empty set."""
        sets: list[list[tuple[str, int]]] = [[] for _ in SLOTS]
        for one, total in zip(kept, totals, strict=True):
            sets[_slot(one)].append((one.key, total))
        pairs = [
            (_hash([key for key, _ in one]), _hash([total for _, total in one])) if one else (0, 0)
            for one in sets
        ]
        return torch.tensor(pairs, dtype=torch.int64)

    def _report_difference(
        self, step: int, kept: list[GuardedTensor], totals: list[int], mine: Tensor, differing: set[int]
    ) -> None:
        slots = {number for number, elements in enumerate(mine[:, 0].tolist()) if elements in differing}
        told = [
            (one.key, one.words, one.name, total)
            for one, total in zip(kept, totals, strict=True)
            if _slot(one) in slots
        ]
        parties: dict[str, dict[int, list[int]]] = {}
        names: dict[str, tuple[str, str]] = {}
        for rank, rows in enumerate(self._everyones(told)):
            for key, words, name, total in rows:
                names[key] = words, name
                parties.setdefault(key, {}).setdefault(total, []).append(rank)
        wrong: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for key, by_value in parties.items():
            if len(by_value) > 1:
                wrong.setdefault(odd_ones(list(by_value.values())), []).append(key)
        sentences = [
            _difference(sure, odd, usual, _listed([names[key][0] for key in keys]))
            for (sure, odd, usual), keys in wrong.items()
        ]
        raise Corrupted(
            f"after step {step} ranks that must hold identical state differ: {'; '.join(sentences)}",
            step,
            sorted({rank for _, odd, _ in wrong for rank in odd}),
            _names(names[key][1] for keys in wrong.values() for key in keys),
            self.trusted,
        )

    def _everyones(self, mine: list[Any]) -> list[list[Any]]:
        return [json.loads(text) for text in self.mesh.hosts.all_gather(json.dumps(mine))]

    # The live state.

    def _live(self) -> Iterator[GuardedTensor]:
        """All weights held here, as the network reads them, and all optimizer states."""
        yield from self._weights
        counts: dict[str, list[tuple[Shard, Tensor]]] = {}
        for piece, elements, kept_as in self._pieces:
            if piece.held.has_master or piece.away is not None:
                yield GuardedTensor(
                    MASTER, piece.name, elements, kept_as, piece.tensor, _reads(piece, "weight")
                )
            for kind, values in sorted(self.optimizer.state.get(piece.tensor, {}).items()):
                if isinstance(values, Tensor) and values.dim() == 0:
                    counts.setdefault("experts" if kept_as == "experts" else "own", []).append(
                        (piece, values)
                    )
                elif isinstance(values, Tensor):
                    yield GuardedTensor(kind, piece.name, elements, kept_as, values, _reads(piece, kind))
        for kept_as, some in counts.items():
            # Grouped into one tensor: each alone would take as long as a small parameter.
            pieces = tuple((piece.name, piece.box.offset, piece.start, piece.stop) for piece, _ in some)
            yield GuardedTensor(
                UPDATES, "", pieces, kept_as, torch.stack([count.to(self.mesh.device) for _, count in some])
            )

    # What does not change between steps is computed once: a GPU idles while its state is listed.

    @cached_property
    def _weights(self) -> list[GuardedTensor]:
        canonical, tp, index = by_name(self.placed.shared.model), self.mesh.layout.tp, self.mesh.coords["tp"]
        found: list[GuardedTensor] = []
        embeddings = 0
        for name, part in self.placed.weights:
            copies = tensor_part(canonical[name], tp, index).copies
            embeddings += name == EMBEDDING
            kept_as = _kept_as(canonical[name], copies, tp, second=embeddings == 2)
            elements = part.offset, tuple(part.local.shape)
            found.append(GuardedTensor(WEIGHT, name, elements, kept_as, part.local, part.read))
        return found

    @cached_property
    def _pieces(self) -> list[tuple[Shard, tuple[Any, ...], str]]:
        """The pieces, each with its elements and the set it belongs to."""
        canonical = by_name(self.placed.shared.model)
        return [
            (
                piece,
                (piece.box.offset, piece.box.shape, piece.start, piece.stop),
                _kept_as(
                    canonical[piece.name], piece.held.part.copies, self.mesh.layout.tp, piece.held.copied
                ),
            )
            for piece in self.placed.gradients.pieces
        ]


def _reads(piece: Shard, kind: str) -> Callable[[], Tensor] | None:
    return None if piece.filed is None else partial(piece.filed.read, kind)


def odd_ones(parties: Sequence[Sequence[int]]) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    """Group ranks by what they hold: whether the culprit can be told, the odd ranks, and the others.

    The largest group of equal ranks is presumed right. If there is none, all ranks are named.
    """
    largest = max(map(len, parties))
    right = [party for party in parties if len(party) == largest]
    if len(right) > 1:
        return False, tuple(sorted({rank for party in parties for rank in party})), ()
    odd = {rank for party in parties if party is not right[0] for rank in party}
    return True, tuple(sorted(odd)), tuple(sorted(set(right[0]) - odd))


def _kept_as(parameter: Parameter, copies: int, tp: int, second: bool) -> str:
    if parameter.name == EMBEDDING:
        return "second embedding" if second else "embedding"
    if parameter.kind == "expert":
        return "experts"
    if copies == 1:
        return "own"
    return "copies" if copies == tp else "shared heads"


def _slot(kept: GuardedTensor) -> int:
    return SLOTS[kept.kept_as, kept.state == WEIGHT]


def _hash(values: Sequence[str | int]) -> int:
    """A non-zero int64."""
    text = "\n".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True) or 1


def _difference(sure: bool, odd: Sequence[int], usual: Sequence[int], what: str) -> str:
    if len(odd) == 1 and not usual:
        return f"rank {odd[0]} has copies that differ in {what}"
    if sure:
        return f"{name_ranks(odd)} differ{'s' * (len(odd) == 1)} from {name_ranks(usual)} in {what}"
    return f"{name_ranks(odd)} differ in {what}, and no majority tells who is right"


def _location(values: Tensor, changed: Sequence[int]) -> str:
    """Where in a tensor, to the block; how many elements of a block changed is unknown."""
    block = BLOCK * min(values.element_size(), 4) // values.element_size()
    first, last = changed[0] * block, min((changed[-1] + 1) * block, values.numel()) - 1
    if len(changed) == 1:
        return f"elements {first}-{last}" if last > first else f"element {first}"
    return f"{len(changed)} blocks of {block} elements, from {first} to {last}"


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return ", ".join(texts[:MOST_NAMED]) + more


def _names(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name))
