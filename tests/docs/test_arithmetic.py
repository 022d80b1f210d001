"""The page of arithmetic says what the planner says, and the planner says what is known."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from tests.docs import arithmetic
from tests.docs.arithmetic import (
    BOTH_GRADIENTS,
    MICRO_BATCHES,
    STAGES,
    TEXTBOOKS,
    WIDE_GRADIENTS,
    Row,
    activations,
    asked,
    giant_on_eight,
    idle_share,
    of,
    seven_alone,
    seventy_for_long,
    seventy_on_eight,
    sharded_traffic,
    sum_of_bytes,
    two_directions,
    weighs,
)

from shoal.facts.cluster.stack import MEGATRON, SHOAL
from shoal.facts.model.parameters import parameter_count
from shoal.facts.model.presets import PRESETS
from shoal.facts.schedules.programs import bubble, instructions, simulate
from shoal.predict.flops import attention_flops, flops_per_token, matrix_parameters
from shoal.predict.memory import ledger
from shoal.predict.memory.inventory import rank_inventories
from shoal.predict.memory.states import optimizer_states, parameters, updated_gradients
from shoal.predict.time.bubble import idle

PAGE = arithmetic.PAGE.read_text()


def test_the_page_is_what_the_planner_says() -> None:
    """If not: ``python -m tests.docs.arithmetic``."""
    for table in (arithmetic.bytes_table(), arithmetic.figures_table()):
        assert table in PAGE
    assert arithmetic.written(PAGE) == PAGE


def test_no_figure_stands_outside_the_tables() -> None:
    prose = re.sub(r"<!-- \w+ -->\n.*?<!-- end -->", "", PAGE, flags=re.DOTALL)
    assert not re.search(r"\d", prose)


# What the figures must come out as, whatever computes them.
KNOWN: dict[Callable[[], Row], str] = {
    sum_of_bytes: "2 + 4 + 4 + 8 = 18",
    seventy_on_eight: "105 GB per GPU at 12 bytes, 140 GB at 16: neither fits",
    giant_on_eight: "2.8 TB of states, 0.64 TB of memory: impossible without offload",
    idle_share: "15.8 %",
    sharded_traffic: "1.5 times, in one precision",
    two_directions: "450 GB/s each way",
    seven_alone: "1.35 years at full rate",
    seventy_for_long: "499 years of one GPU",
    activations: "98 GB without recomputation",
}


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.__name__)
def test_the_known_figures(row: Callable[[], Row]) -> None:
    assert row()[1] == KNOWN[row]


def test_the_wrong_figures_are_told_apart() -> None:
    assert "18.75 %" in idle_share()[0] and "3/19" in idle_share()[2] and "3/16" in idle_share()[2]
    assert "GPipe holds 16 micro-batches, that of 1F1B 4:" in arithmetic.two_schedules()[2]
    assert "900 GB/s" in two_directions()[0]
    assert "42e21 FLOP" in seven_alone()[2]


def test_textbooks_count_12_to_20_bytes_and_so_does_the_ledger() -> None:
    assert [weighs(hold) for hold in TEXTBOOKS.values()] == [12, 16, 16, 18, 20]
    for stack in (MEGATRON, SHOAL, WIDE_GRADIENTS, BOTH_GRADIENTS):
        # Two micro-batches: of one alone Shoal's gradients would rest as they were computed.
        workload = asked("shoal plan llama2-7b --on 1xH100 --seq 4096 --batch 2 --layout dp=1,micro=1", stack)
        (rank,) = rank_inventories(workload)
        states = parameters(rank).device + updated_gradients(rank) + optimizer_states(rank).device
        assert states == weighs(of(stack)) * parameter_count(workload.model)


def test_nothing_of_70b_or_175b_fits_eight_without_offload() -> None:
    for model in ("llama3-70b", "gpt3-175b"):
        for recompute in ("none", "selective", "full"):
            for layout in ("fsdp=8", "tp=8", "fsdp=2,tp=4", "pp=8", "fsdp=2,pp=4", "fsdp=2,zero=1,tp=4"):
                command = f"shoal plan {model} --on 8xH100 --seq 2048 --batch 8"
                assert not ledger(asked(f"{command} --layout {layout},micro=1,recompute={recompute}")).fits


def test_70b_at_12_bytes_is_more_than_eight_devices_hold() -> None:
    assert 70e9 * weighs(arithmetic.NO_MASTER) / 8 > arithmetic.H100.memory_bytes


def test_fsdp_sends_one_and_a_half_times_what_ddp_does_but_for_what_it_gathers_once() -> None:
    model = PRESETS["llama2-7b"]
    ends = 2 * model.vocab * model.hidden + model.hidden
    last_block = (parameter_count(model) - ends) // model.layers
    plain, sharded = arithmetic.sent("dp=8", precision="fp32"), arithmetic.sent("fsdp=8", precision="fp32")
    assert sharded == 1.5 * plain - 7 / 8 * 4 * (ends + last_block)


def test_both_schedules_idle_alike_when_played_and_by_formula() -> None:
    for schedule in ("gpipe", "1f1b"):
        waits = idle(schedule, STAGES, 1, MICRO_BATCHES).work
        played = bubble(simulate(instructions(schedule, STAGES, 1, MICRO_BATCHES)))
        assert played == pytest.approx(waits / (MICRO_BATCHES + waits)) == pytest.approx(3 / 19)


def test_six_flops_a_weight_and_token() -> None:
    model = PRESETS["llama2-7b"]
    attention = 3 * model.layers * attention_flops(model, 0, 4096)
    assert flops_per_token(model, 4096) - attention == 6 * matrix_parameters(model)
