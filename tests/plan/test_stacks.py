"""Plans for other stacks: searched within what they run, priced by their constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.facts.cluster import notation, stack
from shoal.facts.layout import Layout
from shoal.facts.layout.stack_limits import RULES, Asked, runs
from shoal.facts.model import presets
from shoal.facts.problem import BadInput
from shoal.facts.recipe import Recipe
from shoal.plan.judge import judge
from shoal.plan.report import plan
from shoal.plan.request import plan_request
from shoal.plan.search import search
from shoal.plan.space import Space
from shoal.predict.memory import ledger
from shoal.predict.time.step import step
from shoal.predict.workload import Workload

NAMES = sorted(RULES)


@pytest.mark.parametrize("name", NAMES)
def test_a_search_for_a_stack_finds_what_it_runs(name: str) -> None:
    found = plan("llama3-8b", "64xH100", seq=8192, batch=512, stack=name)
    assert found.plans and found.chosen is not None and found.chosen.plan.runs
    for one in found.plans:
        asked = Asked(one.layout, one.workload.model, one.workload.recipe)
        assert one.workload.stack.name == name and runs(name, asked) and one.fits
        assert f"--stack {name}" in one.command and one.command.endswith(f"--export {name}")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_fastest_of_all_that_the_stack_runs(name: str) -> None:
    model, cluster = presets.find("llama3.2-1b"), notation.find("4xA100-40GB")
    recipe = Recipe(seq=2048, batch=8, precision="bf16")
    used = stack.STACKS[name]
    space = Space(model, recipe, 4, stack=name)
    base = Workload(model, cluster, recipe, Layout(), used)
    everything = [replace(base, layout=one.layout()) for one in space.everything()]
    assert everything and all(runs(name, Asked(one.layout, model, recipe)) for one in everything)
    plain = [one for one in everything if not one.layout.offload]
    fastest = min(step(one).seconds for one in plain if ledger(one).fits)
    (best, *_) = search(model, cluster, recipe, stack=used, effort=None).plans
    assert best.step.seconds == pytest.approx(fastest)


def test_a_layout_that_a_stack_does_not_run_is_judged_and_says_so() -> None:
    found = plan(
        "llama3-8b",
        "16xH100",
        seq=4096,
        batch=64,
        layout="fsdp=8,tp=2,recompute=full,micro=1",
        stack="deepspeed",
    )
    (one,) = found.plans
    assert not one.runs and "AutoTP" in one.support
    assert "deepspeed does not run it" in found.decision.text


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"stack": "megatorn"}, "did you mean 'megatron'?"),
        ({"stack": "megatron", "states": "int8"}, "--states fp32"),
        ({"stack": "torchtitan", "optimizer": "sgd"}, "--optimizer adamw"),
        ({"stack": "torchtitan", "lora": 8}, "adapters"),
    ],
)
def test_what_a_stack_cannot_train_is_refused_with_the_nearest(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        plan_request("llama3-8b", "8xH100", seq=4096, batch=64, **asked)
    assert words in str(caught.value)


def test_megatron_keeps_weights_and_wide_gradients_whole() -> None:
    """bf16 weights, fp32 gradients, and of the fp32 master copy and two moments a share: 6 + 12/64 bytes."""
    model, recipe = presets.find("llama3-8b"), Recipe(seq=8192, batch=512, precision="bf16")
    workload = Workload(
        model, notation.find("64xH100"), recipe, Layout.parse("fsdp=64,zero=1,micro=1"), stack.MEGATRON_CORE
    )
    memory, count = ledger(workload), 8_030_261_248
    assert memory.params == pytest.approx(2 * count, rel=0.01)
    assert memory.grads == pytest.approx(4 * count, rel=0.01)
    assert memory.optimizer == pytest.approx(12 * count / 64, rel=0.01)
    narrow = replace(workload, recipe=recipe.model_copy(update={"reduce": "bf16"}))
    assert ledger(narrow).grads == pytest.approx(2 * count, rel=0.01)


def test_what_hides_behind_products_is_left_out_of_the_step() -> None:
    model, recipe = presets.find("llama3-70b"), Recipe(seq=8192, batch=64, precision="bf16")
    layout = Layout.parse("dp=8,tp=8,recompute=full,micro=1")
    base = Workload(model, notation.find("64xH100"), recipe, layout, stack.MEGATRON_CORE)
    shown = judge(replace(base, stack=replace(base.stack, tensor_overlap=0.0))).step
    hidden = judge(base).step
    share = 1 - base.stack.tensor_overlap
    assert share < 1 and hidden.links["tp"] == pytest.approx(share * shown.links["tp"], rel=0.02)
    # Without sequence parallelism there is nothing beside which to hide.
    alone = replace(base, layout=layout.replace(sp=False))
    plain = replace(alone, stack=replace(base.stack, tensor_overlap=0.0))
    assert judge(alone).step.links["tp"] == judge(plain).step.links["tp"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_norms_that_are_computed_again_save_their_results(recompute: str) -> None:
    model, recipe = presets.find("llama3-8b"), Recipe(seq=8192, batch=8, precision="bf16")
    layout = Layout.parse(f"dp=8,micro=1,recompute={recompute}")
    base = Workload(model, notation.find("8xH200"), recipe, layout, stack.MEGATRON_CORE)
    kept = ledger(replace(base, layout=layout.replace(recompute="none"))).activations
    saved = kept - ledger(base).activations
    results = 2 * model.layers * 8192 * model.hidden * 2  # two norms a layer, in bf16
    expected = {"none": 0.0, "selective": results, "full": saved}[recompute]
    assert saved == pytest.approx(expected, rel=0.05, abs=1)
    assert recompute != "full" or saved > results
