"""A precision needs units: what is refused, and what a plan takes by itself."""

from __future__ import annotations

import pytest

from shoal.facts.cluster.devices import CPU, GIB, Device, find
from shoal.facts.cluster.precisions import has_units, refused, usual
from shoal.facts.problem import BadInput
from shoal.plan.request import plan_request


def device(name: str) -> Device:
    found = find(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "precision"),
    [("V100", "fp16"), ("T4", "fp16"), ("A100", "bf16"), ("MI300X", "bf16"), ("cpu", "bf16")],
)
def test_the_usual_one(name: str, precision: str) -> None:
    assert usual(device(name)) == precision


@pytest.mark.parametrize(
    ("name", "precision", "refuses"),
    [
        ("A100", "fp8", True),
        ("H100", "fp8", False),
        ("V100", "bf16", True),
        ("V100", "fp16", False),
        ("T4", "fp32", False),
        ("MI300X", "fp8", False),
        ("RTX3090", "fp8", True),
    ],
)
def test_what_is_refused(name: str, precision: str, refuses: bool) -> None:
    assert bool(list(refused(device(name), precision))) is refuses


def test_nothing_is_refused_where_nothing_is_known() -> None:
    assert has_units(CPU, "fp8") and has_units(Device(name="new", memory_bytes=GIB), "fp8")


def test_a_plan_for_v100_computes_in_fp16() -> None:
    assert plan_request("llama2-7b", "8xV100", seq=2048, batch=64).recipe.precision == "fp16"
    assert plan_request("llama2-7b", "8xA100", seq=2048, batch=64).recipe.precision == "bf16"
    with pytest.raises(BadInput, match="no units for bf16"):
        plan_request("llama2-7b", "8xV100", seq=2048, batch=64, precision="bf16")
    with pytest.raises(BadInput, match="no units for fp8"):
        plan_request("llama2-7b", "8xA100", seq=2048, batch=64, precision="fp8")
