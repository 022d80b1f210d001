"""Days, GPU-hours and cost; curves over GPU counts and sequence lengths."""

from __future__ import annotations

import pytest
from tests.plan.planning import asked, judged

from shoal.facts.cluster import notation
from shoal.plan.scale import cost, over_devices, over_sequences, with_devices


def test_cost_is_arithmetic() -> None:
    plan = judged("fsdp=8,micro=1")
    found = cost(plan, 10**9, price=2.5)
    steps = -(-(10**9) // (64 * 4096))
    assert found.steps == steps
    assert found.training_seconds == pytest.approx(steps * plan.step.seconds)
    assert found.goodput is not None
    assert found.seconds == pytest.approx(found.training_seconds / found.goodput.share)
    assert found.gpu_hours == pytest.approx(found.seconds * 8 / 3600)
    assert found.cost == pytest.approx(found.gpu_hours * 2.5)
    assert found.days == pytest.approx(found.seconds / 86400)
    assert found.kwh == pytest.approx(found.gpu_hours * 0.7) and found.tokens_per_day == 10**9 / found.days
    assert cost(plan, 10**9).cost is None


def test_strong_scaling() -> None:
    points = over_devices(asked("llama3.2-1b", "8xH100", seq=2048, batch=32, tokens="10B"))
    assert [point.devices for point in points] == [1, 2, 4, 8, 16]
    assert {point.batch for point in points} == {32}
    assert points[0].efficiency == 1 and points[0].speedup == 1
    for point in points:
        assert point.plan is not None and point.plan.world == point.devices
        assert point.speedup == pytest.approx((point.efficiency or 0) * point.devices)
        assert point.cost is not None and point.cost.tokens == 10**10
    speeds = [point.speedup or 0 for point in points]
    assert speeds == sorted(speeds), "more GPUs are faster over NVLink, if less and less so"
    assert (points[-1].efficiency or 1) < 1


def test_no_efficiency_is_above_one() -> None:
    """Few GPUs offload what more of them keep: beside those, others would look better than they are."""
    points = over_devices(asked("llama2-13b", "16xA100-80GB", seq=2048, batch=64))
    efficiencies = [point.efficiency for point in points if point.efficiency is not None]
    assert max(efficiencies) == 1 and efficiencies[0] < 1
    base = points[0]
    assert base.speedup == 1
    for point in points:
        assert point.plan is not None and base.plan is not None
        assert point.speedup == pytest.approx(point.plan.tokens_per_s / base.plan.tokens_per_s)


def test_other_lengths_keep_the_tokens_of_a_step() -> None:
    points = over_sequences(asked("llama3.2-1b", "4xH100", seq=2048, batch=16))
    assert [point.seq for point in points] == [512, 1024, 2048, 4096, 8192, 16384]
    assert {point.seq * point.batch for point in points} == {2048 * 16}
    # Learned positions end.
    assert max(point.seq for point in over_sequences(asked("gpt2", "1xH100", seq=512, batch=8))) == 1024


@pytest.mark.parametrize(
    ("cluster", "devices", "expected"),
    [
        ("64xH100", 1, "1xH100"),
        ("4xH100", 16, "16xH100"),
        ("64xH100", 12, None),
        ("2x4xH100", 16, "16xH100"),
        ("8xcpu", 3, "3xcpu"),
    ],
)
def test_more_or_fewer_of_the_same(cluster: str, devices: int, expected: str | None) -> None:
    found = with_devices(notation.find(cluster), devices)
    if expected is None:
        assert found is None
    else:
        assert found is not None and found.devices == devices and found.name == expected
        assert found.device.name in expected


def test_a_cluster_of_unusual_nodes_keeps_them() -> None:
    found = with_devices(notation.find("2x4xH100"), 16)
    assert found is not None and (found.nodes, found.devices_per_node, found.fast_domain) == (4, 4, 4)
