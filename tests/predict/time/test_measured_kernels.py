"""Predictions from a calibration: the measured times, added up; nothing that was fitted to runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.predict.calibrated import BANDWIDTH, HOST, RATE, faster, measurements, stored

from shoal.facts import calibration
from shoal.facts.cluster.notation import find
from shoal.facts.cluster.stack import MEGATRON, SHOAL
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.flops import attention_flops, matrix_parameters
from shoal.predict.time.compiled_operators import HASH_BYTES, HASHES
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.host import queued
from shoal.predict.time.kernels import LayerProduct
from shoal.predict.time.layer import LayerShare
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.measured_layer import by_kind, head
from shoal.predict.time.operators import OperatorWork, Widths, operators
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload


def workload(layout: str = "micro=1", batch: int = 1, compile: bool = False, **recipe: Any) -> Workload:
    said = {"seq": 4096, "precision": "bf16", **recipe, "batch": batch}
    model, used = PRESETS["llama3.2-1b"], Recipe.model_validate(said)
    return Workload(model, find("1xH200"), used, Layout.parse(layout), compile=compile)


def predicted(asked: Workload, **changes: Any) -> StepTime:
    calibration.install("H200", stored(**changes).calibration(Path("a file")))
    return step(asked)


def kernels(**changes: Any) -> MeasuredKernels:
    return MeasuredKernels(
        stored(**changes).calibration(Path("a file")), measurements(**changes), "bf16", Widths(2, 4)
    )


def test_what_was_measured_takes_as_long_as_it_took() -> None:
    odd = measurements().products["bf16"]
    odd = (odd[0].model_copy(update={"seconds": 3 * odd[0].seconds}), *odd[1:])
    here = kernels(products={"bf16": odd})
    assert here.product(4096, 2048, 2048) == pytest.approx(3 * 2 * 4096 * 2048 * 2048 / RATE, rel=1e-3)
    assert here.product(4096, 2048, 2048, "weight") == pytest.approx(2 * 4096 * 2048 * 2048 / RATE, rel=1e-3)


def test_shapes_between_measured_ones_are_near_them() -> None:
    ratio = kernels().product(8192, 2048, 8192) / (2 * 8192 * 2048 * 8192 / RATE)
    assert 0.9 < ratio < 1.1


def test_small_work_takes_as_long_as_starting_it() -> None:
    here = kernels()
    assert (
        here.works([OperatorWork("add", 8.0, 1)])
        == here.works([OperatorWork("add", 1e5, 1)])
        == 1e6 / BANDWIDTH
    )
    assert here.works([OperatorWork("add", 1e12, 1)]) == pytest.approx(1e12 / BANDWIDTH)


def test_a_part_that_was_not_measured_still_has_a_price() -> None:
    without = {name: curve for name, curve in measurements().parts["bf16"].items() if name != "norm"}
    priced = kernels(parts={"bf16": without}).works([OperatorWork("norm", 1e9, 9)])
    assert priced == pytest.approx(1e9 / BANDWIDTH, rel=0.3)


def test_a_step_is_the_sum_of_what_was_measured() -> None:
    """All rates are round here, so products and attention can be worked out by hand."""
    asked = workload()
    calibration.install("H200", stored().calibration(Path("a file")))
    on = CostModel(asked.model, asked.cluster, asked.recipe, SHOAL, calibration.find(asked.cluster))
    assert isinstance(on.kernels, MeasuredKernels)
    kinds = by_kind(asked, on.kernels)
    assert kinds["matrix products"] == pytest.approx(
        6 * matrix_parameters(asked.model) * 4096 / RATE, rel=0.1
    )
    ahead = 4096 * 16 * attention_flops(asked.model, 0, 4096)
    assert kinds["attention"] == pytest.approx(3.5 * ahead / 400e12, rel=0.01)
    whole = step(asked)
    assert whole.seconds > sum(kinds.values())
    # AdamW reads and writes its states six times, reads a gradient that stayed narrow and writes the working copy; the
    # norm reads the gradient: everything at one rate.
    assert whole.optimizer == pytest.approx((6 * 4 + 2 + 2 + 2) * 1.236e9 / BANDWIDTH, rel=0.01)


def test_nothing_fitted_to_runs_plays_a_part() -> None:
    asked = workload()
    as_it_is = predicted(asked)
    other = replace(SHOAL, fusion=9.0, host=9.0, logit_bytes=900.0)
    assert step(replace(asked, stack=other)).seconds == as_it_is.seconds


def test_other_software_is_not_priced_with_our_kernels() -> None:
    asked = replace(workload(), stack=MEGATRON)
    built_in = step(asked).seconds
    # The general model's rates are the same in this calibration; kernel by kernel would differ.
    assert predicted(asked, **faster(1.9)).seconds == pytest.approx(built_in)


def test_faster_products_make_a_faster_step() -> None:
    slow, fast = predicted(workload()), predicted(workload(), **faster(1.5))
    assert fast.seconds < slow.seconds
    assert fast.optimizer == slow.optimizer


def test_recomputation_costs_what_it_repeats() -> None:
    steps = {kind: predicted(workload(f"micro=1,recompute={kind}")) for kind in ("none", "selective", "full")}
    assert steps["none"].recompute == 0 < steps["selective"].recompute < steps["full"].recompute
    # All but the last product of each layer, and what follows it: less than a forward pass of the layers.
    assert steps["full"].recompute < steps["none"].compute / 3
    assert steps["selective"].compute == steps["none"].compute


def test_short_sequences_wait_for_the_host() -> None:
    """A layer's operators cannot be started faster than Python starts them."""
    short = predicted(workload(seq=128))
    forward, backward = operators(PRESETS["llama3.2-1b"], Widths(2, 4))
    started = 16 * (forward * HOST.forward + backward * HOST.backward)
    assert short.compute < started < short.compute + short.other
    patient = predicted(workload(seq=128), host=None)
    assert patient.seconds > 0  # without a measured host the stack's own rate is used
    quick = predicted(workload(seq=128), host=HOST.model_copy(update={"forward": 0.0, "backward": 0.0}))
    assert quick.other < short.other


def test_a_compiled_block_starts_fewer_kernels_and_moves_fewer_bytes() -> None:
    eager, compiled = (predicted(workload(batch=8, layout="micro=8", compile=way)) for way in (False, True))
    assert 0.7 * eager.compute < compiled.compute < 0.9 * eager.compute
    assert compiled.optimizer == eager.optimizer
    eager, compiled = (predicted(workload(seq=128, compile=way)) for way in (False, True))
    assert compiled.compute + compiled.other < 0.7 * (eager.compute + eager.other)


def test_fp32_uses_its_own_products_where_there_are_some() -> None:
    single = tuple(
        one.model_copy(update={"seconds": 10 * one.seconds}) for one in measurements().products["bf16"]
    )
    both = {
        "products": {"bf16": measurements().products["bf16"], "fp32": single},
        "peaks": {"bf16": 989e12, "fp32": 67e12},
    }
    half = predicted(workload(), **both)
    assert predicted(workload(precision="fp32"), **both).compute > 4 * half.compute


@pytest.mark.parametrize(
    ("passes", "times", "expected"),
    [
        # The device is slower everywhere: it never waits.
        ([(2.0, 1.0), (3.0, 1.0)], 4, 0.0),
        # The host is slower everywhere: the step takes as long as it.
        ([(1.0, 2.0), (1.0, 3.0)], 1, 3.0),
        ([(1.0, 2.0), (1.0, 3.0)], 4, 3.0),
        # A lead won in the first pass is spent in the second.
        ([(5.0, 1.0), (1.0, 3.0)], 1, 0.0),
        # Too late: what is lost first is not won back.
        ([(1.0, 3.0), (5.0, 1.0)], 1, 2.0),
        # Of many micro-batches only the first one begins without a lead.
        ([(1.0, 3.0), (5.0, 1.0)], 4, 0.5),
    ],
)
def test_a_lead_of_the_host_is_spent_where_it_is_slower(
    passes: list[tuple[float, float]], times: int, expected: float
) -> None:
    assert queued(passes, times) == pytest.approx(expected)


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_window_is_priced_by_the_pairs_it_lets_through(calibrated: bool) -> None:
    """At the rate of flash's kernel, for the vendor's has no windows; layers without one cost what they did."""
    asked = workload()
    if calibrated:
        calibration.install("H200", stored().calibration(Path("a file")))

    def attention(**changes: Any) -> float:
        """Seconds of a layer, beyond those of a window so short that next to nothing is visible."""
        model = asked.model.model_copy(update=changes)
        on = CostModel(model, asked.cluster, asked.recipe, SHOAL, calibration.find(asked.cluster))
        seconds = on.layer(LayerShare(4096, 4096.0, 1, 4096, 1, 1, False))
        return seconds.forward + seconds.backward

    nothing = attention(window=1)
    whole, half = attention() - nothing, attention(window=1024) - nothing
    pairs = (1024 * 1025 / 2 + 3072 * 1024) / (4096 * 4097 / 2)
    fused, flash = calibration.HOPPER.fused, calibration.HOPPER.flash
    slower = (fused.forward / flash.forward, fused.backward / flash.backward)
    assert min(slower) * pairs * 0.99 < half / whole < max(slower) * pairs * 1.01
    # In half of the layers: the average of the two.
    some = attention(window=1024, window_layers=tuple(range(8))) - nothing
    assert some == pytest.approx((whole + half) / 2)


def test_products_of_compiled_blocks_run_at_the_power_limit() -> None:
    """As much slower as a large product was alone than among others; not where blocks are eager, nor in fp32."""
    limits = {"sustained": RATE / 1.2, "mixed": RATE}
    shape = LayerProduct(4096, 2048, 8192, 2)
    here = kernels(**limits)
    eager, compiled = here.ways(shape), here.ways(shape, compiled=True)
    assert compiled == pytest.approx([1.2 * one for one in eager])
    rates = stored(**limits).calibration(Path("a file"))
    wide = MeasuredKernels(rates, measurements(**limits), "fp32", Widths(4, 4))
    assert wide.ways(shape, compiled=True) == wide.ways(shape)
    # Blocks and head, and nothing else.
    by_limit = [predicted(workload(compile=True), **changes) for changes in ({}, limits)]
    products = 6 * matrix_parameters(PRESETS["llama3.2-1b"]) * 4096 / RATE
    assert by_limit[1].compute - by_limit[0].compute == pytest.approx(0.2 * products, rel=0.02)
    assert by_limit[1].optimizer == by_limit[0].optimizer
    eagerly = [predicted(workload(), **changes) for changes in ({}, limits)]
    assert eagerly[0].compute == eagerly[1].compute


def test_products_in_fp32_are_priced_by_the_rate_that_others_reached() -> None:
    """Whatever their shape: tiles are those of tensor cores, which compute none of them."""
    seen = measurements().products["bf16"]
    given = {"products": {"fp32": seen}, "peaks": {"bf16": 989e12, "fp32": 67e12}}
    rates = stored(**given).calibration(Path("a file"))
    wide = MeasuredKernels(rates, measurements(**given), "fp32", Widths(4, 4))
    odd = 16384, 768, 769
    assert wide.product(*odd) == pytest.approx(2 * 16384 * 768 * 769 / RATE, rel=1e-6)


def test_a_file_with_one_kernel_for_all_attention_still_prices_windows() -> None:
    """Files from before windows had a kernel of their own have the vendor's rate for it."""
    hopper = calibration.HOPPER
    one_rate = hopper.model_copy(update={"flash": hopper.fused})
    found = stored().model_copy(update={"device": one_rate}).calibration(Path("a file")).device
    assert found.fused == hopper.fused and found.flash == pytest.approx(hopper.flash)


def test_compiled_dropout_costs_its_hashes() -> None:
    model, tokens = PRESETS["llama3.2-1b"], 4096
    times = [predicted(workload(compile=True, dropout=one)).compute for one in (0.0, 0.1)]
    features = 2 * tokens * model.hidden * model.layers
    assert times[1] - times[0] == pytest.approx(sum(HASHES) * HASH_BYTES * features / BANDWIDTH, rel=0.2)


def test_a_step_begins_with_the_lead_that_the_host_has_left() -> None:
    """Issued while the device computes the one before, it waits for nothing; with a loss scale it waits as ever."""
    slow = HOST.model_copy(update={"once": 20e-3})
    for precision, waits in (("bf16", 0.0), ("fp16", slow.once)):
        times = predicted(workload("micro=2", 2, precision=precision), host=slow)
        assert times.other == pytest.approx(waits, abs=1e-3)
    # Where the host is the slower of the two for a whole step, each step takes as long as the host.
    crawling = HOST.model_copy(update={"forward": 1e-3, "backward": 1e-3})
    asked = workload(batch=4)
    found = predicted(asked, host=crawling)
    forward, backward = operators(asked.model, Widths(2, 4))
    assert found.seconds >= 4 * asked.model.layers * (forward + backward) * 1e-3


def test_one_kernel_makes_loss_and_gradients_of_a_vocabulary_that_is_whole() -> None:
    """On a GPU; capped logits and tensor ranks need two, on a CPU operators are as they were."""
    asked = workload()
    calibration.install("H200", stored().calibration(Path("a file")))
    on = CostModel(asked.model, asked.cluster, asked.recipe, SHOAL, calibration.find(asked.cluster))
    assert isinstance(on.kernels, MeasuredKernels)
    rows, held = asked.model.vocab, on.handling("whole", 1)

    def forward(rows: int, once: bool) -> float:
        assert isinstance(on.kernels, MeasuredKernels)
        return head(on.model, on.kernels, 4096, rows, held, compiled=False, once=once).forward

    once_more = 2 * 4096 * rows / BANDWIDTH
    assert forward(rows, once=False) - forward(rows, once=True) == pytest.approx(once_more, rel=0.05)
    assert forward(rows // 2, once=True) == forward(rows // 2, once=False)
    assert on.head(4096, rows, held, compiled=False).forward == forward(rows, once=True)
    capped = asked.model.model_copy(update={"logit_cap": 30.0})
    bent = CostModel(capped, asked.cluster, asked.recipe, SHOAL, on.rates)
    assert bent.head(4096, rows, held, compiled=False).forward == forward(rows, once=False)
