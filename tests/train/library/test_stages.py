"""Pipelines of a module that Shoal did not build: plans that name its parts, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.library.small import build
from torch import Tensor, nn

from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.parallel.module_pipeline import ModuleBatch, ModuleStage
from shoal.parallel.module_stages import absent_modules, stage_of, stage_plan
from shoal.parallel.module_tensor import check_plan, plan_of


class Floor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: float, outside: bool) -> tuple[Tensor, int]:
        y = self.other(self.one(x).relu()) * scale
        return (y if outside else x + y), 0


class Tower(nn.Module):
    """Blocks that give more than hidden states. ``outside``: their residual is not their own."""

    def __init__(self, outside: bool = False) -> None:
        super().__init__()
        self.outside = outside
        self.stem = nn.Linear(6, 6)
        self.tower = nn.ModuleList(Floor() for _ in range(4))
        self.head = nn.Linear(6, 90)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.tower:
            y, _ = block(x, scale=0.5, outside=self.outside)
            x = x + y if self.outside else y
        return self.head(x).square().mean()


PLAN = {"stem": "first", "tower": "blocks", "head": "last"}


def test_stages_are_cut_by_parameters() -> None:
    model, layout = Tower(), Layout.parse("pp=2")
    plan = stage_plan(model, PLAN, layout)
    assert plan.blocks == [f"tower.{number}" for number in range(4)]
    # The head is as large as all blocks together, so the last of them is with it alone.
    assert [list(stage_of(model, plan, layout, place).layers) for place in (0, 1)] == [[0, 1, 2], [3]]
    assert stage_plan(model, {"stem": "first", "tower.*": "blocks", "head": "last"}, layout) == plan


@pytest.mark.parametrize("kind, blocks", [("llama", "model.layers"), ("qwen3", "model.layers")])
def test_a_hugging_face_model_brings_its_plan(kind: str, blocks: str) -> None:
    model: Any = build(kind)
    plan = stage_plan(model, None, Layout.parse("pp=2"))
    assert plan.first == ["model.embed_tokens"] and plan.last == ["model.norm", "lm_head"]
    assert plan.blocks == [f"{blocks}.{number}" for number in range(3)]
    from peft import LoraConfig, get_peft_model  # takes longer than all tests here

    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    within = stage_plan(adapted, None, Layout.parse("pp=2"))
    assert within.last == ["base_model.model.model.norm", "base_model.model.lm_head"]


@pytest.mark.parametrize(
    "plan, layout, word",
    [
        (None, "pp=2", '"stem": "first", "tower": "blocks", "head": "last"'),
        ({"stem": "first", "tower": "blocks"}, "pp=2", "head.weight is in no stage"),
        ({**PLAN, "stme": "first"}, "pp=2", "no module 'stme'"),
        (PLAN, "pp=5", "pp=4 or less"),
        (PLAN, "pp=2,schedule=interleaved", "1f1b or gpipe"),
        (PLAN, "pp=2,schedule=zbv", "1f1b or gpipe"),
    ],
    ids=str,
)
def test_what_no_stages_can_be_made_of(plan: Any, layout: str, word: str) -> None:
    with pytest.raises(BadInput) as error:
        stage_plan(Tower(), plan, Layout.parse(layout))
    assert word in str(error.value)


def test_a_loss_of_all_routers_needs_all_blocks() -> None:
    model: Any = build("llama")
    model.config.output_router_logits = True
    with pytest.raises(BadInput, match="output_router_logits"):
        stage_plan(model, None, Layout.parse("pp=2"))


def test_what_has_adapters_is_not_split() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = build("llama")
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(BadInput, match="q_proj has an adapter"):
        check_plan(model, plan_of(model, None, 2), 2)
    adapted = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(BadInput, match="PEFT has renamed"):
        plan_of(adapted, None, 2)


def mean(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return model(rows), 1


def stage(place: int, words: dict[str, str], outside: bool = False) -> ModuleStage:
    model, layout = Tower(outside), Layout.parse("pp=2")
    plan = stage_plan(model, words, layout)
    own = stage_of(model, plan, layout, place)
    made = ModuleStage(model, plan, own, absent_modules(plan, own), torch.device("cpu"), lambda _: None)
    made.let_go()
    made.take_part()
    return made


def test_stages_are_one_pass() -> None:
    rows = torch.randn(4, 6)
    torch.manual_seed(0)
    whole = float(mean(Tower(), rows)[0].detach())
    stages = []
    for place in (0, 1):
        torch.manual_seed(0)
        stages.append(stage(place, PLAN))
    batch = ModuleBatch(rows, 0, mean)
    hidden = stages[0](torch.empty(0), batch)
    assert stages[1](torch.empty(0), batch, probing=True).shape == hidden.shape
    assert float(stages[1](hidden, batch).detach()) == whole == float(stages[1].totals[0])


def test_a_plan_in_another_order_than_the_model_runs_in() -> None:
    batch = ModuleBatch(torch.ones(4, 6), 0, mean)
    with pytest.raises(BadInput, match="stem runs before blocks"):
        stage(0, {**PLAN, "stem": "last"})(torch.empty(0), batch)
    with pytest.raises(BadInput, match="head is used again behind the blocks"):
        stage(1, {**PLAN, "head": "first"})(torch.ones(4, 6), batch)

    for place in (0, 1):
        with pytest.raises(BadInput, match="computes something in between"):
            stage(place, PLAN, outside=True)(torch.ones(4, 6), batch)

    def twice(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
        return model(rows) + model(rows), 1

    with pytest.raises(BadInput, match="called twice"):
        stage(1, PLAN)(torch.ones(4, 6), ModuleBatch(torch.ones(4, 6), 0, twice))
