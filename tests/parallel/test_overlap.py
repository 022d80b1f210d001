"""Gradients travel behind the computation of earlier layers. Nothing is timed: what counts is the order of events.

When each gradient is computed, how many sums have been asked for? And does a rank go on computing while its peer has
not even begun? A rank that waits for its sums would wait for ever then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.parallel.sharding import ROWS, SEQ, Case, batches, place
from tests.predict.counted import ask
from tests.ranks import run_ranks

from shoal.facts.layout import Layout
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel.placed import Placed
from shoal.prove.dryrun import dryrun

PATIENCE = 60  # seconds until a rank that was never told to go on gives up
REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Arrival:
    """A gradient, as it has been computed and before anything is done with it."""

    label: str
    micro: int
    issued: int  # sums over data ranks that this step has asked for so far


def reductions(counter: CollectiveCounter) -> int:
    return sum(call.op in REDUCTIONS for call in counter.calls)


def on_gradients(placed: Placed, labels: list[str], told: Callable[[str], None]) -> None:
    for label, parameter in zip(labels, placed.gradients.computed_with(), strict=True):
        # Of the tensor: before it is accumulated, and so before the hooks that send.
        parameter.register_hook(lambda gradient, label=label: told(label))


def labels_of(placed: Placed) -> list[str]:
    return [name for segment in placed.segments for name, _ in segment.network.named_parameters()]


def arrivals(rank: int, world: int, case: Case) -> tuple[list[Arrival], list[list[str]]]:
    """The gradients of a step in the order in which they came, and the buckets that they are sent in."""
    placed, mesh = place(case, rank)
    labels, seen, came = labels_of(placed), [], dict[str, int]()
    counter = CollectiveCounter(mesh.names, log=True)

    def told(label: str) -> None:
        micro = came.get(label, 0)
        seen.append(Arrival(label, micro, reductions(counter)))
        came[label] = micro + 1

    on_gradients(placed, labels, told)
    placed.gradients.start_step()
    with counter:
        placed.executor.forward_backward(batches(case, mesh), 1 / (ROWS * SEQ))
        placed.gradients.finish_step()
    stages: Any = getattr(placed.gradients, "stages", None)
    cut = [[one.label for one in bucket.held] for bucket in stages[0].buckets] if stages else []
    return seen, cut


@pytest.mark.parametrize(
    ("layout", "every_pass"), [("dp=2", False), ("fsdp=2,zero=1", False), ("fsdp=2,zero=2", True)]
)
def test_a_bucket_is_sent_as_soon_as_its_gradients_are_there(layout: str, every_pass: bool) -> None:
    for seen, cut in run_ranks(2, arrivals, Case(layout)):
        assert len(cut) > 3
        sent_before = 0
        for micro in (0, 1):
            there: set[str] = set()
            for arrival in (one for one in seen if one.micro == micro):
                complete = next((n for n, bucket in enumerate(cut) if not there.issuperset(bucket)), len(cut))
                sending = every_pass or micro == 1
                assert arrival.issued == sent_before + (complete if sending else 0), arrival
                there.add(arrival.label)
            sent_before += len(cut) if every_pass else 0
        # The point of it: of the step's last gradient, all but its own bucket are on their way.
        assert seen[-1].issued == sent_before - every_pass * len(cut) + len(cut) - 1


def test_a_unit_is_reduced_before_the_unit_before_it_is_computed() -> None:
    case = Case("fsdp=2", tune={})
    order = ["embed_tokens", *(f"layers.{layer}." for layer in range(case.model.layers)), "lm_head"]
    for seen, _ in run_ranks(2, arrivals, case):
        for arrival in seen:
            # The last norm travels with the last block.
            unit = next((n for n, name in enumerate(order) if name in arrival.label), len(order) - 2)
            # Autograd reaches a block's input only when its last gradients are computed.
            assert arrival.issued == arrival.micro * len(order) + len(order) - 1 - unit, arrival


def gathered_ahead(rank: int, world: int, case: Case) -> list[tuple[int, int]]:
    """For every block, how many units have been asked for when its forward pass runs, and its first gradient comes."""
    placed, mesh = place(case, rank)
    counter, forward, backward = CollectiveCounter(mesh.names, log=True), [], dict[int, int]()
    labels = labels_of(placed)

    def gathers() -> int:
        return sum(call.op == "all_gather" for call in counter.calls)

    def told(label: str) -> None:
        if "layers." in label:
            backward.setdefault(int(label.split(".")[2]), gathers())

    for block in placed.segments[0].network.model.layers.values():
        block.register_forward_pre_hook(lambda module, arguments: forward.append(gathers()))
    placed.gradients.start_step()
    (batch, *_) = batches(case, mesh)
    on_gradients(placed, labels, told)
    with counter:
        placed.executor.forward_backward([batch], 1.0)
    return [(forward[layer], backward[layer]) for layer in sorted(backward)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_units_are_gathered_ahead_of_the_one_that_is_computed(ahead: int) -> None:
    case = Case("fsdp=2", tune={"prefetch": ahead})
    layers = case.model.layers
    units = layers + 2  # with the embedding and the head
    # The head and the last block stay from the forward to the backward pass, which does not read the embedding.
    expected = [
        (
            min(units, 2 + layer + ahead),
            units + min(layers - 1, layers - 1 - layer + ahead),
        )
        for layer in range(layers)
    ]
    for found in run_ranks(2, gathered_ahead, case):
        assert found == expected


def go_on(flag: Path) -> None:
    began = time.monotonic()
    while not flag.exists():
        assert time.monotonic() - began < PATIENCE, "the other rank waits for its sums and computes nothing"
        time.sleep(0.005)


class Telling(CollectiveCounter):
    """Raises a flag with its ``last``-th gathering."""

    def __init__(self, flag: Path, last: int) -> None:
        super().__init__(log=True)
        self.flag, self.last = flag, last

    def __torch_dispatch__(self, *arguments: Any, **others: Any) -> Any:
        result = super().__torch_dispatch__(*arguments, **others)
        if sum(call.op == "all_gather" for call in self.calls) == self.last:
            self.flag.touch()
        return result


def without_waiting(rank: int, world: int, case: Case, directory: Path) -> None:
    """The second rank begins when the first has computed what it can without it; and so again with the update."""
    placed, mesh = place(case, rank)
    (queue,) = placed.gradients.stages.values()  # type: ignore[attr-defined]
    computed, updated = directory / "computed", directory / "updated"
    second = {one.label for one in queue.buckets[1].held}

    def told(label: str) -> None:
        """``zero=2`` holds two buckets at most: it goes on until the second is complete."""
        second.discard(label)
        if not second and rank == 0:
            computed.touch()

    if case.layout == "fsdp=2,zero=2":
        on_gradients(placed, labels_of(placed), told)
    placed.gradients.start_step()
    if rank == 1:
        go_on(computed)
    placed.executor.forward_backward(batches(case, mesh), 1 / (ROWS * SEQ))
    computed.touch()
    placed.gradients.finish_step()
    if mesh.layout.fsdp > 1:
        if rank == 1:
            go_on(updated)
        with Telling(updated, len(queue.buckets)):
            placed.gradients.after_update()


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2,zero=1", "fsdp=2,zero=2"])
def test_a_rank_computes_on_while_its_gradients_travel(layout: str, tmp_path: Path) -> None:
    run_ranks(2, without_waiting, Case(layout), tmp_path)


@pytest.mark.parametrize(
    "layout",
    ["dp=2,pp=2,schedule=interleaved", "fsdp=2,zero=2,pp=2,schedule=zbv", "fsdp=2,pp=2,schedule=zbv"],
)
def test_a_stage_is_reduced_while_the_rank_s_other_stage_is_computed(layout: str) -> None:
    """In a pipeline every stage is complete at its own time; messages tell where in the step that is."""
    parsed = Layout.parse(layout)
    changes = {"layers": 4, "hidden": 64, "ffn": 160, "head_dim": 8, "vocab": 200}
    calls = dryrun(ask(layout, changes, seq=64, batch=8), 0).calls
    group = "dp" if parsed.dp > 1 else "fsdp"
    sums = [
        n for n, call in enumerate(calls) if call.group == group and call.op in REDUCTIONS and call.bytes > 64
    ]
    messages = [n for n, call in enumerate(calls) if call.op in ("send", "receive")]
    assert sums[0] < messages[-1]
