"""Whether what the planner's search assumes holds: for random workloads and layouts, everything that it assumes.

    python benchmarks/plan_bounds.py --cases 20000

A search drops what cannot fit and leaves what cannot be fast, by bounds on layouts that are decided in part
(``plan/time_bound.py``, ``plan/memory_bound.py``). Each must stay below what ``predict`` says of every completion.
Besides, the search takes it that states over fewer ranks and larger units need no less memory, and that offload is
never faster.

Each case draws a workload (a model, dense, mixed or with LoRA; a cluster; a recipe; a stack), a whole layout of its
space, and asks everything of its parts. What fails is printed; exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from shoal.facts.cluster import Cluster, notation
from shoal.facts.cluster.stack import SHOAL, Stack
from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import Layout, accumulation
from shoal.facts.layout.stack_limits import RULES
from shoal.facts.ledger import Ledger
from shoal.facts.model import Model, presets
from shoal.facts.recipe import Recipe
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.more_offload import HEAVIER, LIGHTER, removable
from shoal.plan.space import NOTHING, Candidate, Space, StateSharding
from shoal.plan.time_bound import TimeBound
from shoal.predict.memory import ledger
from shoal.predict.memory.device import HOST_USABLE, NVME_USABLE
from shoal.predict.time.step import cost_model, step
from shoal.predict.workload import Workload as Question

MODELS = (
    "tiny",
    "gpt2",
    "llama3-8b",
    "llama3-70b",
    "llama3.2-1b",
    "mistral-7b",
    "qwen2-7b",
    "pythia-6.9b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "gpt3-175b",
    "qwen3-32b",
)
CLUSTERS = (
    *("1xH100", "2xA100-80GB", "4xH200", "8xH100", "16xH100", "64xA100-40GB", "256xH100"),
    *("3x4xH100", "6x2xH200", "4x1xH100", "4xcpu", "8xB200"),
)
STACKS = (SHOAL, replace(SHOAL, host=3e-3, overlap=0.2), replace(SHOAL, host=0.0, overlap=1.0))
# Deeper pipelines take long to play through.
STAGES = 32
# Sums in another order.
ROUNDING = 1 + 1e-9


@dataclass
class Workload:
    """Everything but a layout, and what a search makes of it."""

    asked: Question

    @cached_property
    def bounds(self) -> TimeBound:
        asked = self.asked
        return TimeBound(cost_model(asked), asked.tune, asked.lora, asked.cluster.devices)

    @cached_property
    def room(self) -> MemoryBound:
        asked = self.asked
        return MemoryBound(asked.model, asked.cluster, asked.recipe, asked.stack, asked.lora)

    @cached_property
    def space(self) -> Space:
        asked = self.asked
        apart = asked.cluster.device.name != "cpu"
        return Space(asked.model, asked.recipe, asked.cluster.devices, apart=apart, stack=asked.stack.name)

    def workload(self, candidate: Candidate) -> Question:
        return replace(self.asked, layout=candidate.layout())

    def seconds(self, candidate: Candidate) -> float:
        return step(self.workload(candidate), self.bounds.on).seconds

    def memory(self, candidate: Candidate) -> Ledger:
        return ledger(self.workload(candidate))


def workload(draw: random.Random, stacks: Sequence[Stack] = STACKS) -> Workload:
    model, cluster = _model(draw), notation.find(draw.choice(CLUSTERS))
    seq = 2 ** draw.randint(8, 13)
    if model.positions == "learned":
        seq = min(seq, model.max_positions)
    recipe = Recipe(
        seq=seq,
        batch=cluster.devices * draw.choice([1, 1, 2, 3, 8]) // draw.choice([1, 1, 2]) or 1,
        precision=draw.choice(["bf16", "bf16", "bf16", "fp32", "fp16"]),
        states=draw.choice(["fp32", "fp32", "bf16"]),
        reduce=draw.choice(["fp32", "bf16"]),
        optimizer=draw.choice(["adamw", "adamw", "sgd"]),
        clip=draw.choice([0.0, 1.0, 1.0]),
        dropout=draw.choice([0.0, 0.0, 0.1]),
    )
    tune = TuneSection(
        bucket_mb=draw.choice([25.0, 25.0, 1.0, 400.0]),
        prefetch=draw.choice([1, 1, 0, 3]),
        persist_below=draw.choice([0, 0, 0, 10**7, 10**15]),
    )
    lora = draw.choice([None, None, None, Lora(), Lora(rank=64, alpha=64.0)])
    stack = draw.choice(stacks)
    # Adapters are the engine's own.
    return Workload(
        Question(model, cluster, recipe, Layout(), stack, tune, None if stack.name in RULES else lora)
    )


def _model(draw: random.Random) -> Model:
    """A preset, often with fewer layers: the ends then weigh more."""
    model = presets.find(draw.choice(MODELS))
    if draw.random() < 0.5:
        layers = draw.randint(1, min(16, model.layers))
        dense = [
            number for number in (model.experts.dense_layers if model.experts else ()) if number < layers
        ]
        experts = model.experts and model.experts.model_copy(update={"dense_layers": tuple(dense)})
        windows = model.window_layers and tuple(one for one in model.window_layers if one < layers)
        update = {"layers": layers, "experts": experts, "window_layers": windows}
        model = model.model_copy(update=update)
    return model


def candidate(draw: random.Random, space: Space) -> Candidate | None:
    """A layout of the space, each decision as likely as the others of its kind."""
    splits = list(space.splits())
    if not splits:
        return None  # no batch divides, or no position is left
    split = draw.choice(splits)
    share, order = draw.choice(list(space.shares(split))), draw.choice(space.orders(split))
    offload = draw.choice([NOTHING, *space.offloads]) if draw.random() < 0.4 else NOTHING
    sharings = list(space.states(split, share.ep, offload))
    if not sharings:
        return None  # a stack that does not offload this here
    states = draw.choice(sharings)
    return Candidate(split, share, order, states, draw.choice(space.units(split, states)))


def too_high(case: Workload, one: Candidate) -> Iterator[str]:
    """What does not hold of one layout's parts, in words."""
    split, share, order, states, _ = one
    bounds, room = case.bounds, case.room
    seconds = case.seconds(one)
    # Time, from the first decision to the last.
    handled = bounds.handled(split, share, states)
    worked = bounds.of_order(split, share, order, handled)
    orders = case.space.orders(split)
    exchanged = bounds.of_exchange(split, share, orders)
    late = case.space.orders(split, None, order.schedule in SPLIT_BACKWARD)
    fill = bounds.fill(split.pp, accumulation(case.asked.recipe.batch, split.data, share.micro), late)
    compiled = bounds.compiled(split, order)
    times = {
        "of_split": bounds.of_split(split),
        "of_split with orders": bounds.of_split(split, orders),
        "of_split with micro": bounds.of_split(split, orders, share.micro),
        "of_tokens": fill * bounds.of_tokens(split, share),
        "of_layers": fill * bounds.of_layers(split, share, compiled),
        "of_rate": fill * bounds.of_rate(split, share, compiled),
        "of_share": bounds.of_share(split, share),
        "of_share with exchange": bounds.of_share(split, share, orders=orders) + exchanged,
        "of_share with recompute": bounds.of_share(split, share, order.recompute),
        "of_share with orders": bounds.of_share(split, share, order.recompute, orders) + exchanged,
        "of_order": bounds.of_order(split, share, order) + exchanged,
        "of_order handled": worked + bounds.of_exchange(split, share, orders, (states.zero,)),
        "of_update": worked
        + bounds.of_exchange(split, share, orders, (states.zero,))
        + bounds.of_update(split, share, order, states.zero, states.offload),
        "of_states": bounds.of_states(split, share, order, states, worked),
    }
    if states.offload:
        undecided = bounds.of_order(split, share, order)
        away = bounds.of_offload(split, share, order, states.offload, undecided)
        times["of_offload"] = away + exchanged
        if any(part.what == "activations" for part in states.offload):
            alike = case.space.orders(split, order.recompute, order.schedule in SPLIT_BACKWARD)
            sent = bounds.of_sending(split, share, alike)
            times["of_sending"] = bounds.of_order(split, share, order) + exchanged + sent
        kept = case.seconds(one._replace(states=states._replace(offload=NOTHING)))
        if kept > seconds * ROUNDING:
            yield f"offload is faster: {kept:.6g} s without it, {seconds:.6g} s with it"
        for more in HEAVIER.get(states.offload, ()):
            slower = case.seconds(one._replace(states=states._replace(offload=more)))
            if seconds > slower * ROUNDING:
                yield f"more offload is faster: {seconds:.6g} s, {slower:.6g} s with {'+'.join(map(str, more))}"
    for name, bound in times.items():
        if bound > seconds * ROUNDING:
            yield f"time {name}: {bound:.6g} s, predicted {seconds:.6g} s"
    if split.pp * order.chunks > STAGES:
        return
    # Memory.
    memory = case.memory(one)
    peak = memory.peak_allocated * ROUNDING
    resting, at_update = room.of_split(split, share.ep, states.offload)
    needs = {
        "of_split": at_update,
        "of_share": room.of_share(split, share, resting),
        "of_orders": room.of_orders(split, share, case.space.orders(split, order.recompute), states.offload),
        "of_order": room.of_order(split, share, order, states.offload),
        "of_states": room.of_states(split, share, order, states),
    }
    for lighter in LIGHTER.get(states.offload, ()):
        more = case.memory(one._replace(states=states._replace(offload=lighter)))
        gone = removable(one, lighter, more)
        needs[f"removable of {'+'.join(map(str, lighter)) or 'nothing'}"] = more.peak_allocated - gone
    for name, bound in needs.items():
        if bound > peak:
            yield f"memory {name}: {bound / 2**20:.3f} MiB, predicted {memory.peak_allocated / 2**20:.3f} MiB"
    # What fits is not dropped, whatever the device's size: this one fits exactly.
    sized = _sized(case.asked.cluster, memory)
    exactly = MemoryBound(case.asked.model, sized, *_rest(case.asked))
    if not exactly.has_place(split, share, order, states):
        yield f"memory has_place: {memory.host} bytes of a host and {memory.nvme} of its disks are not enough"
    if not exactly.fits(split, memory.peak_allocated):
        yield f"memory fits: {memory.device_p90} bytes are not enough for a plan that needs as many"
    if share.ep > 1:
        return  # experts that no other rank of a copy holds are gathered from nowhere
    # Where small units stay gathered, larger ones may need less.
    smallest = one._replace(unit=1) if case.asked.tune.persist_below == 0 else one
    for other in (smallest, smallest._replace(states=_frugal(one))):
        frugal = case.memory(other)
        if frugal.device_p90 > memory.device_p90 * ROUNDING:
            yield (
                f"memory grows with shards: {frugal.device_p90 / 2**20:.3f} MiB in {other.layout()}, "
                f"{memory.device_p90 / 2**20:.3f} MiB here"
            )


def _frugal(one: Candidate) -> StateSharding:
    most = one.split.data if one.layout().shards > 1 else 1
    return one.states._replace(dp=one.split.data // most, fsdp=most)


def _sized(cluster: Cluster, memory: Ledger) -> Cluster:
    """One whose devices, hosts and disks have room for as much and no more."""
    device = cluster.device.model_copy(update={"memory_bytes": memory.device_p90})
    host, nvme = (
        ceil(size * cluster.devices_per_node / usable) + 2 * cluster.devices_per_node
        for size, usable in ((memory.host, HOST_USABLE), (memory.nvme, NVME_USABLE))
    )
    return cluster.model_copy(update={"device": device, "host_memory": host, "nvme": nvme})


def _rest(asked: Question) -> tuple[Recipe, Stack, Lora | None]:
    return asked.recipe, asked.stack, asked.lora


def found(seed: int, cases: int, each: int = 20, stacks: Sequence[Stack] = STACKS) -> Iterator[str]:
    """What fails in so many layouts, of which ``each`` belong to one workload."""
    draw = random.Random(seed)
    for number in range(cases):
        if number % each == 0:
            case = workload(draw, stacks)
        one = candidate(draw, case.space)
        if one is None:
            continue
        asked = case.asked
        for what in too_high(case, one):
            yield (
                f"{asked.model.name} with {asked.model.layers} layers on {asked.cluster}, {asked.stack.name}, "
                f"seq={asked.recipe.seq} batch={asked.recipe.batch} {asked.recipe.precision} {asked.recipe.states} "
                f"reduce={asked.recipe.reduce} {asked.recipe.optimizer} lora={asked.lora and asked.lora.rank} "
                f"{asked.tune.bucket_mb:g} {asked.tune.prefetch} {asked.tune.persist_below}, "
                f"{one.layout()}: {what}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for line in found(options.seed, options.cases):
        print(line, flush=True)
        failed += 1
    print(f"{options.cases} cases, {failed} failures")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
