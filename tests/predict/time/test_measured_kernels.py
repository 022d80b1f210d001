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
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.host import queued
from shoal.predict.time.layer import LayerShare
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.measured_layer import by_kind
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
