"""What the engine runs passes; what it does not is refused, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.facts import support
from shoal.facts.config import Config
from shoal.facts.layout import RECOMPUTES, SCHEDULES, Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput

TINY = PRESETS["tiny"]


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        *(f"dp=2,fsdp=2,zero={zero},unit=2" for zero in (1, 2, 3)),
        "tp=4",
        "tp=4,sp=0",
        *(f"pp=2,schedule={schedule}" for schedule in SCHEDULES),
        *(f"recompute={recompute}" for recompute in RECOMPUTES),
        "dp=2,fsdp=2,tp=2,pp=2,micro=1,recompute=full",
        "fsdp=2,recompute=selective,offload=activations:0.5",
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_run(layout: str, strict: bool) -> None:
    config = Config.model_validate({"run": {"strict": strict}})
    assert support.missing(config, TINY, Layout.parse(layout)) == []
    assert support.runs(Layout.parse(layout))


@pytest.mark.parametrize(
    ("layout", "what", "fix"),
    [
        ("offload=activations", "layout: offload=activations with recompute=none", "recompute=full"),
    ],
)
def test_layouts_that_are_not_run(layout: str, what: str, fix: str) -> None:
    (problem,) = support.missing(Config(), TINY, Layout.parse(layout))
    assert problem.what == f"{what}: this version of Shoal does not train with it"
    assert problem.fix.startswith(fix)
    assert not support.runs(Layout.parse(layout))


@pytest.mark.parametrize("recipe", [{"optimizer": "muon"}, {"precision": "fp8"}], ids=str)
def test_adapters_are_not_run_with_everything(recipe: dict[str, Any]) -> None:
    assert support.missing(Config.model_validate({"model": {"lora": {}}}), None, Layout()) == []
    asked = Config.model_validate({"model": {"lora": {}}, "recipe": recipe})
    (problem,) = support.missing(asked, None, Layout())
    assert problem.what.startswith("model.lora with") and problem.fix


def test_what_rests_away_is_not_scaled_for_fp8() -> None:
    config = Config.model_validate({"recipe": {"precision": "fp8"}})
    (problem,) = support.missing(config, None, Layout.parse("offload=params"))
    assert problem.what.startswith('layout: offload=params with recipe.precision = "fp8"')
    assert problem.fix == "offload=optimizer"
    assert not support.missing(config, None, Layout.parse("offload=optimizer"))


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_strict_mode_has_no_scales_that_depend_on_a_batch(precision: str) -> None:
    config = Config.model_validate({"run": {"strict": True}, "recipe": {"precision": precision}})
    (problem,) = support.missing(config, None, Layout())
    assert (
        problem.what.startswith(f'run.strict with recipe.precision = "{precision}"') and "bf16" in problem.fix
    )


def test_everything_is_refused_at_once() -> None:
    config = Config.model_validate({"evaluate": {"ema": True}, "recipe": {"states": "int8"}})
    with pytest.raises(BadInput) as caught:
        support.check(config, PRESETS["deepseek-v3"], Layout.parse("offload=optimizer+activations"))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("model", "recipe", "what", "fix"),
    [
        ("tiny", {"router_aux": 0.01}, "recipe.router_aux = 0.01 with tiny, which has no experts", "= 0"),
        ("tiny", {"router_z": 0.1}, "recipe.router_z = 0.1 with tiny, which has no experts", "= 0"),
        ("tiny-moe", {"precision": "fp8"}, 'recipe.precision = "fp8" with the experts of tiny-moe', "bf16"),
    ],
)
def test_recipes_that_a_model_does_not_take(
    model: str, recipe: dict[str, object], what: str, fix: str
) -> None:
    config = Config.model_validate({"recipe": recipe})
    (problem,) = support.missing(config, PRESETS[model], Layout())
    assert problem.what.startswith(what) and fix in problem.fix


@pytest.mark.parametrize(
    ("values", "what", "fix"),
    [
        (
            {"recipe": {"groups": [{"match": "*.q_porj.*", "lr": 1.0}]}},
            "matches no parameter",
            "q_proj.weight",
        ),
        ({"recipe": {"groups": [{"match": "*", "frozen": True}]}}, "frozen = true of all", "train some"),
        ({"evaluate": {"ema": True}}, "evaluate.ema without recipe.ema", "recipe.ema"),
        ({"run": {"strict": True}, "recipe": {"optimizer": "adafactor"}}, "adafactor", "adamw"),
        ({"server": {"servers": 1}, "recipe": {"optimizer": "muon"}}, "no whole matrix", "lion"),
        ({"server": {"servers": 1}, "recipe": {"ema": 0.9}}, "recipe.ema", "server.servers = 0"),
    ],
)
def test_what_optimizers_do_not_go_with(values: dict[str, Any], what: str, fix: str) -> None:
    (problem,) = support.missing(Config.model_validate(values), TINY, Layout())
    assert what in problem.what and fix in problem.fix


def test_the_host_rounds_no_sgd_by_chance() -> None:
    recipe = {"optimizer": "sgd", "states": "bf16"}
    away = Layout.parse("offload=optimizer")
    (problem,) = support.missing(Config.model_validate({"recipe": recipe}), TINY, away)
    assert 'recipe.states = "bf16"' in problem.what and 'recipe.rounding = "nearest"' in problem.fix
    nearest = Config.model_validate({"recipe": {**recipe, "rounding": "nearest"}})
    assert support.missing(nearest, TINY, away) == []


@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_optimizers_that_are_run(optimizer: str) -> None:
    groups = [{"match": "*.self_attn.*", "lr": 0.1}, {"match": "*norm*", "weight_decay": 0.1}]
    recipe = {"optimizer": optimizer, "ema": 0.9, "groups": groups}
    config = Config.model_validate({"run": {"strict": True}, "recipe": recipe, "evaluate": {"ema": True}})
    assert support.missing(config, TINY, Layout()) == []


def test_routed_experts_have_no_adapters() -> None:
    """Whatever else a model with experts has, may have some."""
    attention, mlp = ["q_proj", "o_proj"], ["down_proj"]
    for targets, name, wrong in (
        (attention, "mixtral-8x7b", None),
        (mlp, "qwen3-30b-a3b", "down_proj"),
        (["gate"], "mixtral-8x7b", "gate"),  # a router is no projection
        (["q_b_proj", *mlp], "deepseek-v3", None),  # of dense layers and shared experts
        (["q_proj"], "deepseek-v3", "q_proj"),
        ("all-linear", "mixtral-8x7b", None),
        (["all-linear"], "mixtral-8x7b", "all-linear"),
    ):
        asked = Config.model_validate({"model": {"lora": {"targets": targets}}})
        found = support.missing(asked, PRESETS[name], Layout.parse("fsdp=8,ep=8"))
        assert [repr(wrong) in one.what for one in found] == ([True] if wrong else [])
        assert [("routed experts" in one.what) == (wrong == "down_proj") for one in found] == [True] * len(
            found
        )


def test_blocks_of_four_bits_are_not_cut() -> None:
    asked = Config.model_validate({"model": {"lora": {"base": "nf4"}}})
    model = PRESETS["llama3-8b"]
    assert support.missing(asked, model, Layout.parse("fsdp=8,tp=8")) == []
    narrow = model.model_copy(update={"ffn": 64 * 7 * 4})
    assert support.missing(asked, narrow, Layout.parse("tp=4")) == []
    (problem,) = support.missing(asked, narrow, Layout.parse("tp=8"))
    assert "down_proj" in problem.what and "tp=8" in problem.what and "tp" in problem.fix
    (problem,) = support.missing(asked, model.model_copy(update={"ffn": 1000}), Layout())
    assert problem.fix == 'base = "bf16"'
