"""Kernels: against what was measured on an H200, and as physics wants it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.facts import calibration
from shoal.facts.cluster import notation
from shoal.predict.time.kernels import Kernels, LayerProduct

H200 = notation.find("1xH200")
MEASURED = Path(__file__).parents[3] / "benchmarks" / "data" / "h200_measured.jsonl"
# (inner, columns) of the matrices that were measured, by tag.
SHAPES = {
    "gemm_1b_wqkv": (2048, 3072),
    "gemm_1b_wo": (2048, 2048),
    "gemm_1b_w13": (2048, 16384),
    "gemm_1b_w2": (8192, 2048),
    "gemm_1b_head": (2048, 128256),
    "gemm_8b_wqkv": (4096, 6144),
    "gemm_8b_wo": (4096, 4096),
    "gemm_8b_w13": (4096, 28672),
    "gemm_8b_w2": (14336, 4096),
    "gemm_8b_head": (4096, 128256),
}


def kernels(name: str = "1xH200") -> Kernels:
    cluster = notation.find(name)
    device = cluster.device
    assert device.memory_bandwidth is not None
    peak = device.peak("bf16")
    assert peak is not None
    return Kernels(calibration.find(cluster).device, peak, device.memory_bandwidth, 2)


def test_products_measured_on_an_h200() -> None:
    """Forward, input gradient and weight gradient of ten shapes; no constant was fitted on these."""
    ours, errors = kernels(), []
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        if row["tag"] in SHAPES:
            inner, columns = SHAPES[row["tag"]]
            shapes = ((row["T"], inner, columns), (row["T"], columns, inner), (inner, row["T"], columns))
            for shape, taken in zip(shapes, row["ms"], strict=True):
                errors.append(ours.product(*shape) * 1e3 / taken - 1)
    assert len(errors) == 30
    assert sum(map(abs, errors)) / len(errors) < 0.06
    assert max(map(abs, errors)) < 0.2


def test_grouped_products_measured_on_an_h200() -> None:
    """All experts in one kernel, of 256, 1,024 and 4,096 rows each: one constant for all three."""
    ours, errors = kernels(), []
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        if row["tag"] == "grouped_mm":
            shape = LayerProduct(row["rows"] // row["experts"], row["hidden"], row["ffn"], 1, row["experts"])
            errors.append(ours.ways(shape)[0] * 1e3 / row["ms"] - 1)
    assert len(errors) == 3
    assert sum(map(abs, errors)) / len(errors) < 0.06
    assert max(map(abs, errors)) < 0.12


def test_grouped_products_read_the_matrix_of_every_expert() -> None:
    ours = kernels()
    few = LayerProduct(1, 7168, 2048, 1, 32)
    every = 32 * 7168 * 2048
    assert min(ours.ways(few)) >= ours.moved(2 * every)
    # Waves are those of all experts together: as many products one after another take longer.
    many = LayerProduct(1024, 2048, 768, 1, 128)
    assert all(
        together < 128 * alone
        for together, alone in zip(ours.ways(many), ours.ways(many._replace(groups=1)), strict=True)
    )


def test_attention_measured_on_an_h200() -> None:
    ours = kernels()
    # 4 sequences of 4096, 32 heads of 128: four products of half the square.
    flops = 2 * 4 * 4096**2 * 32 * 128
    forward, backward = ours.attention("fused", flops, 128)
    assert forward * 1e3 == pytest.approx(0.932, rel=0.03)
    assert backward * 1e3 == pytest.approx(2.953, rel=0.03)
    forward, backward = ours.attention("flash", flops, 128)
    assert forward * 1e3 == pytest.approx(1.679, rel=0.03)
    assert backward * 1e3 == pytest.approx(5.031, rel=0.03)


def test_one_tile_more_than_there_are_multiprocessors_starts_another_wave() -> None:
    ours = kernels()
    tiles = 132  # one for every multiprocessor
    full, one_more = (ours.product(256 * count, 8192, 128) for count in (tiles, tiles + 1))
    assert one_more > 1.1 * full  # less than twice as long: smaller tiles waste less then


def test_thin_products_wait_for_memory() -> None:
    ours = kernels()
    taken = ours.product(1, 8192, 8192)
    assert taken == pytest.approx(ours.moved(2 * (8192 + 8192**2 + 8192)) + ours.rates.launch)


def test_narrow_heads_reach_no_more_than_wide_ones() -> None:
    ours = kernels("1xA100")
    assert ours.attention("flash", 1e12, 64)[0] >= ours.attention("flash", 1e12, 128)[0]
