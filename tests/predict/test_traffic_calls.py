"""The planner's cheap calls against the exact list, and what is announced ahead of the engine against its formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import SCHEDULES, Layout
from shoal.facts.layout.legality import Case, broken
from shoal.facts.layout.ranks import AXES, line
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.facts.schedules.programs import Action, programs
from shoal.facts.traffic import show_ranks
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import rank_parameters
from shoal.predict.traffic import busiest_stage, calls, merged, pipeline, traffic
from shoal.predict.workload import Workload

LAYOUTS = [
    "dp=8",
    "dp=2,tp=4",
    "dp=4,pp=2",
    "fsdp=8",
    "fsdp=8,zero=1",
    "fsdp=4,zero=2,micro=1,tp=2",
    "dp=2,fsdp=4,unit=3",
    "fsdp=4,unit=2,tp=2,recompute=full",
    "fsdp=2,tp=2,pp=2,schedule=interleaved",
    "dp=2,fsdp=2,zero=1,pp=2,schedule=zbv",
    "tp=4,sp=0,pp=2,schedule=zb,recompute=selective",
    "tp=8",
]
MODELS = ["tiny", "gpt2", "llama3-8b", "qwen3-32b", "llama3-405b"]


def workload(
    layout: str,
    model: Model | str = "llama3-8b",
    on: str = "8xcpu",
    tune: TuneSection | None = None,
    lora: Lora | None = None,
    **recipe: Any,
) -> Workload:
    shape = PRESETS[model] if isinstance(model, str) else model
    values = {"seq": 1024, "batch": 16, "precision": "bf16", **recipe}
    asked = Layout.parse(layout)
    return Workload(shape, find(on), Recipe(**values), asked, tune=tune or TuneSection(), lora=lora)


def legal(asked: Workload) -> bool:
    recipe = asked.recipe
    return not any(broken(Case.of(asked.layout, asked.model, recipe)))


@pytest.mark.parametrize("model", MODELS)
def test_the_cheap_form_is_close_to_the_exact_one(model: str) -> None:
    for layout in LAYOUTS:
        asked = workload(layout, model)
        if not legal(asked):
            continue
        times = asked.accumulation
        for stage in range(asked.layout.pp):
            rank = stage * (asked.layout.world // asked.layout.pp)
            exact = {(one.op, one.group): one for one in traffic(asked, rank)}
            cheap = {(one.op, one.group): one for one in merged(calls(asked, stage), asked, rank)}
            assert exact.keys() == cheap.keys(), layout
            for key, one in exact.items():
                # Padding, and shares of small sums that one rank has more of than another.
                assert cheap[key].bytes == pytest.approx(one.bytes, rel=0.01, abs=100_000), (layout, key)
                assert cheap[key].count == pytest.approx(one.count, rel=0.2, abs=3 * times), (layout, key)


def test_the_cheap_form_of_sharded_parameters_is_exact() -> None:
    for layout in ("fsdp=8", "dp=2,fsdp=4,unit=3", "fsdp=8,micro=1,recompute=full"):
        for model in MODELS:
            asked = workload(layout, model)
            assert merged(calls(asked), asked, 0) == traffic(asked, 0), (layout, model)


def test_one_rank_alone_sends_nothing() -> None:
    assert traffic(workload("dp=1")) == [] and calls(workload("dp=1")) == ()


@pytest.mark.parametrize("model", ["tiny", "gpt2"])
def test_all_ranks_of_a_group_announce_the_same(model: str) -> None:
    """Else some would wait for ever."""
    for layout in LAYOUTS:
        asked = workload(layout, model, seq=64)
        if not legal(asked):
            continue
        seen = [traffic(asked, rank) for rank in range(asked.layout.world)]
        for rank, mine in enumerate(seen):
            for one in mine:
                if one.group in AXES:
                    others = line(rank, one.group, asked.layout)
                    # On a CPU the only axis is also the group of the small sums, which all ranks have.
                    assert all(one in seen[other] for other in others), (layout, rank, one)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_are_those_of_the_programs(schedule: str) -> None:
    chunks = {"interleaved": (2, 3), "zb": (1, 2), "zbv": (2,), "dualpipev": (2,)}
    for pp in (2, 3, 4):
        for number in chunks.get(schedule, (1,)):
            asked = workload(f"pp={pp},schedule={schedule},chunks={number},micro=2")
            made = programs(schedule, pp, number, asked.accumulation)
            for stage, program in enumerate(made):
                listed = Counter(instruction.action for instruction in program)
                here = rank_parameters(asked.layout, asked.model, asked.recipe.seq, stage)
                sent = {call.op: call.count for call in pipeline.calls(asked, here)}
                assert sent == {
                    "send": listed[Action.SEND_FORWARD] + listed[Action.SEND_BACKWARD],
                    "receive": listed[Action.RECEIVE_FORWARD] + listed[Action.RECEIVE_BACKWARD],
                }


def test_groups_are_named_as_the_counter_names_them() -> None:
    asked = workload("dp=2,tp=2,pp=2", PRESETS["tiny"].model_copy(update={"kv_heads": 1, "tied": True}))
    groups = {(one.op, one.group) for one in traffic(asked, 3)}
    assert ("send", "ranks 3,7") in groups  # the pipeline's two directions have groups of their own
    assert ("all_reduce", "ranks 3,7") in groups  # and so have the ends that hold a tied embedding
    assert ("all_reduce", "ranks 2,3") in groups  # and the ranks that share a key/value head
    assert ("all_reduce", "world") in groups
    alone = {one.group for one in traffic(workload("dp=8"))}
    assert alone == {"dp"}
    assert {one.group for one in traffic(workload("dp=8", on="8xH100"))} == {"dp", "world"}
    assert show_ranks([0, 4, 8, 12]) == "ranks 0-12 by 4"


def test_the_default_rank_is_of_the_busiest_stage() -> None:
    asked = workload("dp=2,pp=4", "gpt2")
    stage = busiest_stage(asked)
    assert traffic(asked) == traffic(asked, 2 * stage)
    moved = [sum(one.bytes for one in traffic(asked, 2 * place)) for place in range(4)]
    assert moved[stage] == max(moved)


# Announced ahead of the engine.


def only(found: tuple[CollectiveCall, ...], group: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and the bytes of all of them, by operation and phase."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for call in found:
        if call.group == group:
            count, size = sums.get((call.op, call.phase), (0, 0))
            sums[call.op, call.phase] = count + call.count, size + call.count * call.bytes
    return sums


def test_a_ring_passes_keys_and_values_and_their_gradients() -> None:
    asked = workload("fsdp=2,cp=4,micro=2,recompute=full")  # 8B: 32 layers, 8 key/value heads of 128
    exchanges = 4 * 32 * 3  # micro-batches, layers, turns
    size = 2 * 256 * 2 * 8 * 128 * 2
    assert only(calls(asked), "cp") == {
        ("send", "forward"): (exchanges, exchanges * size),
        ("receive", "forward"): (exchanges, exchanges * size),
        ("send", "backward"): (2 * exchanges, 2 * exchanges * size),
        ("receive", "backward"): (2 * exchanges, 2 * exchanges * size),
        ("send", "recompute"): (exchanges, exchanges * size),
        ("receive", "recompute"): (exchanges, exchanges * size),
    }


def test_ulysses_exchanges_heads_for_tokens() -> None:
    asked = workload("cp=4,cp_kind=ulysses,tp=2")  # 16 query heads and 4 key/value heads a tensor rank
    layers, tokens = 32, 16 * 256
    size = tokens * (2 * 16 + 2 * 4) * 128 * 2
    found = only(calls(asked), "cp")
    assert found[("all_to_all", "forward")] == (4 * layers, layers * size)
    assert found[("all_to_all", "backward")] == (4 * layers, layers * size)
    # Fewer key/value heads than ranks: each goes to several.
    few = only(calls(workload("cp=8,cp_kind=ulysses,tp=2")), "cp")
    assert few[("all_to_all", "forward")][1] == layers * 16 * 128 * (2 * 16 + 2 * 8) * 128 * 2


def test_context_ranks_share_states_with_the_others() -> None:
    groups = {call.group for call in calls(workload("dp=2,fsdp=2,cp=2"))}
    assert groups == {"fsdp·cp", "dp", "cp", "control", "everyone"}
    gathered = only(calls(workload("fsdp=4,cp=2")), "fsdp·cp")[("all_gather", "gather forward")]
    assert gathered == only(calls(workload("fsdp=8")), "fsdp")[("all_gather", "gather forward")]


def test_tokens_travel_to_their_experts_and_back() -> None:
    asked = workload("fsdp=8,ep=4,micro=1", "mixtral-8x7b")  # 32 layers, 8 experts, 2 active, 4096 wide
    passes = 2 * 32
    size = 1024 * 2 * 4096 * 2
    found = only(calls(asked), "ep")
    assert found[("all_to_all", "forward")] == (3 * passes, passes * (2 * size + 8 * 8))
    assert found[("all_to_all", "backward")] == (2 * passes, passes * 2 * size)


def test_experts_are_sharded_over_the_ranks_that_are_left() -> None:
    expert = 3 * 4096 * 14336
    asked = workload("fsdp=8,ep=4", "mixtral-8x7b")
    left = only(calls(asked), "fsdp/ep")
    assert left[("all_gather", "gather forward")] == (32, 32 * 2 * expert * 2)  # two experts a rank, in bf16
    assert left[("reduce_scatter", "gradients")] == (32, 32 * 2 * expert * 4)
    assert asked.ranks_of("fsdp/ep")[1:] == (2, 4) and asked.ranks_of("ep")[1:] == (4, 1)
    # All of a copy's ranks have different experts, and so have two of the copies.
    spread = workload("dp=4,fsdp=2,ep=4", "mixtral-8x7b")
    assert only(calls(spread), "dp/ep")[("all_reduce", "gradients")][1] == 32 * 2 * expert * 4
    assert spread.ranks_of("dp/ep")[1:] == (2, 4)
    # Nobody is left.
    assert not {"fsdp/ep", "dp/ep"} & {call.group for call in calls(workload("fsdp=8,ep=8", "mixtral-8x7b"))}


def test_every_expert_is_summed_wherever_it_lives() -> None:
    """However experts are spread, a rank sums those that it has."""
    experts = 32 * 8 * 3 * 4096 * 14336
    for layout in ("dp=8,ep=2", "dp=8,ep=4", "fsdp=8,zero=1,ep=2", "dp=2,fsdp=4,zero=1,ep=4"):
        asked = workload(layout, "mixtral-8x7b", reduce="bf16")
        reduced = sum(
            call.bytes * call.count
            for call in calls(asked)
            if call.phase == "gradients" and call.op != "all_gather" and "/ep" in call.group
        )
        assert reduced == pytest.approx(2 * experts / asked.layout.ep, rel=0.01), layout


def test_low_rank_additions_are_all_that_is_summed() -> None:
    lora = Lora(rank=16, targets=["q_proj", "v_proj"])
    added = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    summed = only(calls(workload("dp=8", lora=lora)), "dp")
    assert summed[("all_reduce", "gradients")][1] == pytest.approx(4 * added)
    sharded = only(calls(workload("fsdp=8", lora=lora)), "fsdp")
    assert sharded[("reduce_scatter", "gradients")][1] == pytest.approx(4 * added, rel=0.01)
    whole = only(calls(workload("fsdp=8")), "fsdp")
    gathers, gathered = sharded[("all_gather", "gather forward")]
    # What is frozen is gathered as ever, and with it what was added.
    assert gathers == whole[("all_gather", "gather forward")][0]
    assert gathered == pytest.approx(whole[("all_gather", "gather forward")][1] + 2 * added, rel=1e-6)
    assert traffic(workload("dp=8", lora=lora)) == merged(
        calls(workload("dp=8", lora=lora)), workload("dp=8"), 0
    )


def test_groups_have_a_span() -> None:
    asked = workload(
        "dp=2,fsdp=2,tp=4,pp=2", PRESETS["tiny"].model_copy(update={"kv_heads": 2, "tied": True})
    )
    spans = {call.group: asked.ranks_of(call.group)[1:] for call in calls(asked)}
    assert spans == {
        "dp": (2, 8),
        "fsdp": (2, 4),
        "tp": (4, 1),
        "tp copies": (2, 1),
        "pp": (2, 16),
        "pp ends": (2, 16),
        "control": (32, 1),
        "everyone": (32, 1),
    }
    assert workload("fsdp=2,cp=2,tp=2").ranks_of("fsdp·cp")[1:] == (4, 2)
