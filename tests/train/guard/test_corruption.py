"""A bit that flips on one rank is found, named and told to all ranks before anything moves, in every kind of layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.launch.local import prepared
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job, resolve
from shoal.train.data.collection import Collection
from shoal.train.first_weights import first_weights
from shoal.train.guard.corruption import SETS, SLOTS, Corrupted, CorruptionGuard, odd_ones
from shoal.train.program import Program

NORM, LAYER, EMBEDDING = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
KEYS = "model.layers.1.self_attn.k_proj.weight"

REST, UNCHECKED, JUST_BEFORE = "at rest", "in a step that is not checked", "just before ranks compare"


@dataclass(frozen=True)
class Flip:
    """One bit of one rank's state."""

    when: str
    rank: int
    name: str
    state: str = "weight"
    element: int = 0
    bit: int = 20
    which: int = -1  # of several parameters of that name


class Rig:
    """One rank's training, with the guard wired as the loop does it."""

    def __init__(self, job: Job, dataset: Path, rank: int, every: int) -> None:
        self.mesh = Mesh(job.layout, rank, torch.device("cpu"))
        self.program = Program(job, Collection.open(dataset), self.mesh, first_weights(job))
        self.guard = CorruptionGuard(self.program.step, every, done=0)
        self.program.step.before_update = self.guard.before_update

    def run(self, step: int, before_check: Callable[[], None] = lambda: None) -> None:
        batches = [self.program.loader.rows(step, places) for places in self.program.positions(step)]
        (targets,) = self.mesh.hosts.sum_integers([self.program.own_targets(batches)])
        self.program.step(step, batches, targets)
        before_check()
        if self.guard.due(step):
            self.guard.after_step(step)

    def flip(self, flip: Flip) -> None:
        if self.mesh.rank == flip.rank:
            word = self._tensor(flip).detach().view(-1).view(torch.int32)
            word[flip.element] ^= 1 << flip.bit

    def _tensor(self, flip: Flip) -> Tensor:
        placed = self.program.placed
        if flip.state == "weight":
            return [part.local for name, part in placed.weights if name == flip.name][flip.which]
        found = [piece for piece in placed.gradients.pieces if piece.name == flip.name]
        values: Tensor = self.program.optimizer.state[found[flip.which].tensor][flip.state]
        return values

    def values(self) -> list[Tensor]:
        return [part.local.clone() for _, part in self.program.placed.weights]


def watch_over(
    rank: int, world: int, jobs: list[Job], flips: Sequence[Flip | None], dataset: Path
) -> list[tuple[str, dict[str, Any], bool]]:
    """For each job and flip: what this rank raised and when, as a row of faults.jsonl, and whether weights moved."""
    seen = []
    for job, flip in zip(jobs, flips, strict=True):
        # One step more than is checked: so there are steps in between that nobody watches.
        rig = Rig(job, dataset, rank, every=1 if flip is None or flip.when == REST else 3)
        when = ""
        before = rig.values()
        try:
            for step in range(1, 5):
                when = f"step {step}"
                if flip is None or step != 3:
                    rig.run(step)
                elif flip.when == JUST_BEFORE:
                    rig.run(step, partial(rig.flip, flip))
                else:
                    rig.flip(flip)
                    before = rig.values()
                    rig.run(step)
            seen.append(("", {}, False))
        except Corrupted as error:
            same = all(torch.equal(old, new) for old, new in zip(before, rig.values(), strict=True))
            seen.append((when, error.row(), same))
    return seen


@pytest.fixture
def found(settings: Callable[..., list[str]]) -> Callable[..., list[list[tuple[str, dict[str, Any], bool]]]]:
    """What every rank saw, for each layout and flip."""

    def run(world: int, cases: Sequence[tuple[str, Flip | None]], **overrides: Any) -> list[list[Any]]:
        jobs = [resolve(load(None, settings(**overrides), layout).config) for layout, _ in cases]
        dataset = prepared(jobs[0].config.data, Console(stderr=True))
        results = run_ranks(world, watch_over, jobs, [flip for _, flip in cases], dataset)
        return [list(case) for case in zip(*results, strict=True)]

    return run


Found = Callable[..., list[list[tuple[str, dict[str, Any], bool]]]]


@pytest.mark.parametrize(
    ("world", "layouts", "overrides"),
    [
        (
            2,
            [
                "dp=2",
                "fsdp=2",
                "fsdp=2,zero=1",
                "fsdp=2,zero=2",
                "tp=2",
                "tp=2,sp=0",
                "pp=2",
                "pp=2,schedule=zb",
                "cp=2",
                "zero=1,cp=2,cp_kind=ulysses",
            ],
            {},
        ),
        (2, ["dp=2", "fsdp=2,zero=1", "pp=2"], {"run__strict": True}),
        (2, ["dp=2", "fsdp=2", "tp=2"], {"recipe__optimizer": "sgd"}),
        (2, ["dp=2"], {"recipe__precision": "bf16"}),
        # With more ranks than key/value heads, neighbours share one.
        (4, ["tp=4", "tp=4,sp=0", "dp=2,tp=2", "fsdp=2,tp=2,zero=1", "dp=2,fsdp=2", "pp=2,tp=2"], {}),
    ],
    ids=["two", "strict", "sgd", "bf16", "four"],
)
def test_a_sound_run_is_left_alone(
    found: Found, world: int, layouts: list[str], overrides: dict[str, Any]
) -> None:
    """With the state compared after every step: what is said to be alike is, to the bit."""
    for layout, ranks in zip(
        layouts, found(world, [(one, None) for one in layouts], **overrides), strict=True
    ):
        assert ranks == [("", {}, False)] * world, layout


def test_at_rest(found: Found) -> None:
    cases = [
        ("dp=2", Flip(REST, 1, LAYER, element=17, bit=0)),
        ("dp=2", Flip(REST, 0, LAYER, "exp_avg_sq")),
        ("fsdp=2", Flip(REST, 1, NORM)),
        ("fsdp=2", Flip(REST, 0, EMBEDDING, "exp_avg")),
        # Rows that another rank owns, which the next all-gather would have overwritten.
        ("fsdp=2,zero=1", Flip(REST, 1, EMBEDDING)),
        ("tp=2", Flip(REST, 1, LAYER)),
        ("pp=2", Flip(REST, 1, EMBEDDING)),
    ]
    for (layout, flip), ranks in zip(cases, found(2, cases), strict=True):
        assert flip is not None
        (when, row, same), other = ranks
        assert (when, row, same) == other, layout
        assert (when, same) == ("step 3", True), (layout, row)
        assert (row["ranks"], row["parameters"], row["step"]) == ([flip.rank], [flip.name], 2), layout
        # Step 2's state was taken when ranks had compared it, but may have been committed after it changed.
        assert row["trusted_step"] == 1
        said = "after the update of step 2 and before the next one, memory was corrupted on rank "
        assert row["message"].startswith(f"{said}{flip.rank}: {flip.state} of {flip.name} (elements 0-")


def test_what_differs_between_two_ranks_names_both(found: Found) -> None:
    cases = [
        ("dp=2", Flip(UNCHECKED, 1, LAYER)),
        ("dp=2", Flip(UNCHECKED, 0, LAYER, "exp_avg_sq")),
        ("fsdp=2,zero=1", Flip(JUST_BEFORE, 1, LAYER)),
        ("fsdp=2,zero=2", Flip(JUST_BEFORE, 1, LAYER)),
        ("tp=2", Flip(UNCHECKED, 1, NORM)),
        ("tp=2,sp=0", Flip(UNCHECKED, 1, NORM, "exp_avg_sq")),
        # The two ends of a tied embedding.
        ("pp=2", Flip(UNCHECKED, 1, EMBEDDING)),
    ]
    for (layout, flip), ranks in zip(cases, found(2, cases), strict=True):
        assert flip is not None
        (when, row, _), other = ranks
        assert (when, row["message"]) == (other[0], other[1]["message"]), layout
        assert when == "step 3", layout
        assert (row["ranks"], row["step"], row["trusted_step"]) == ([0, 1], 3, 0), layout
        assert flip.name in row["parameters"], layout
        assert "ranks 0,1 differ in " in row["message"]
        assert row["message"].endswith("and no majority tells who is right"), layout


def test_ranks_with_other_experts_still_compare_what_both_hold(found: Found, tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    path.write_text(json.dumps(write_config(PRESETS["tiny-moe"])))
    cases = [(layout, Flip(JUST_BEFORE, 1, NORM)) for layout in ("dp=2,ep=2", "fsdp=2,zero=1,ep=2")]
    sound: list[tuple[str, Flip | None]] = [("dp=2,ep=2", None), ("fsdp=2,ep=2", None)]
    for layout, ranks in zip([*cases, *sound], found(2, [*cases, *sound], model__path=path), strict=True):
        for when, row, _ in ranks:
            if layout in cases:
                assert (when, row["ranks"], row["parameters"]) == ("step 3", [0, 1], [NORM]), layout
            else:
                assert not when, layout


def test_of_more_the_odd_one_is_named(found: Found) -> None:
    # What differs when ranks compare is all that differs: nothing was computed with it yet.
    cases = [("dp=4", Flip(JUST_BEFORE, 2, LAYER)), ("tp=4", Flip(JUST_BEFORE, 3, NORM))]
    for (layout, flip), ranks in zip(cases, found(4, cases), strict=True):
        assert flip is not None
        assert {row["message"] for _, row, _ in ranks} == {
            "after step 3 ranks that must hold identical state differ: "
            f"rank {flip.rank} differs from ranks {','.join(str(r) for r in range(4) if r != flip.rank)} "
            f"in weight of {flip.name}"
        }, layout
        assert all(row["ranks"] == [flip.rank] and row["parameters"] == [flip.name] for _, row, _ in ranks)


def test_of_shared_heads_only_their_holders_are_named(found: Found) -> None:
    """Four ranks, two heads: the first two ranks hold one, the last two the other."""
    ((*_, (_, row, _)),) = found(4, [("tp=4", Flip(JUST_BEFORE, 2, KEYS))])
    assert (row["ranks"], row["parameters"]) == ([2, 3], [KEYS])


def test_both_ends_on_one_rank(found: Found) -> None:
    """In strict mode one rank holds a tied embedding twice."""
    (((when, row, _),),) = found(1, [("dp=1", Flip(REST, 0, EMBEDDING))], run__strict=True)
    assert (when, row["ranks"], row["parameters"]) == ("step 3", [0], [EMBEDDING])
    ((first, second),) = found(2, [("dp=2", Flip(JUST_BEFORE, 1, EMBEDDING))], run__strict=True)
    assert first[1] == second[1]
    # Three of the four copies agree.
    assert first[1]["ranks"] == [1]
    assert f"rank 1 differs from rank 0 in weight of {EMBEDDING}" in first[1]["message"]
    (((when, row, _),),) = found(1, [("dp=1", Flip(JUST_BEFORE, 0, EMBEDDING))], run__strict=True)
    assert when == "step 3"
    assert f"rank 0 has copies that differ in weight of {EMBEDDING}" in row["message"]


def test_only_when_it_is_due() -> None:
    class Nothing:
        placed = optimizer = None
        mesh = Mesh(Layout(), 0, torch.device("cpu"))

    guard = CorruptionGuard(Nothing(), every=10, done=0)  # type: ignore[arg-type]
    assert [step for step in range(1, 31) if guard.due(step)] == [10, 20, 30]
    assert not any(CorruptionGuard(Nothing(), 0, 0).due(step) for step in range(1, 31))  # type: ignore[arg-type]
    guard.before_update()  # nothing was taken, so nothing is asked of anybody


def test_who_is_odd() -> None:
    assert odd_ones([[0, 1, 3], [2]]) == (True, (2,), (0, 1, 3))
    assert odd_ones([[0], [1, 2, 3, 4], [5]]) == (True, (0, 5), (1, 2, 3, 4))
    assert odd_ones([[0], [1]]) == (False, (0, 1), ())
    assert odd_ones([[0, 1], [2, 3], [4]]) == (False, (0, 1, 2, 3, 4), ())
    # A rank may hold something twice.
    assert odd_ones([[0, 0, 1], [1]]) == (True, (1,), (0,))
    assert odd_ones([[0], [0]]) == (False, (0,), ())


def test_every_set_has_its_slot() -> None:
    assert sorted(SLOTS.values()) == list(range(2 * len(SETS)))
