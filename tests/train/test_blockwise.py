"""Moments in 8 bits: what a code keeps, that blocks are the same in every layout, and what an update becomes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.train.test_other_optimizers import DENSE, EXPERTS, a_step
from tests.train.test_rounding import LAYOUTS
from torch import Tensor

from shoal.facts.blockwise import LONGEST_BLOCK, block_length, cuts_a_block, moment_bytes
from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.layout.legality import violations
from shoal.facts.layout.updates import Sharing, updated_ranges
from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.facts.support import missing
from shoal.models.initial import fill
from shoal.models.random import bits
from shoal.parallel.shards import piece_slices
from shoal.train import blockwise_adamw
from shoal.train.blockwise import MEAN, SQUARE, MomentCode, decode, encode, scales
from shoal.train.blockwise_adamw import BlockwiseAdamW
from shoal.train.optimizer import clip_and_update, set_learning_rate
from shoal.train.step import Step

INT8: dict[str, Any] = {"precision": "bf16", "states": "int8", "seq": 8}


def test_blocks_lie_in_rows_and_stay_whole_where_rows_are_cut() -> None:
    assert block_length((4096, 4096)) == LONGEST_BLOCK
    assert block_length((8, 4096, 14336)) == LONGEST_BLOCK
    assert block_length((4096, 11008)) == 172  # an eighth of the row is 1376
    assert block_length((64, 20)) == 5 and block_length((64, 8191)) == 1
    assert block_length((4096,)) is None
    assert moment_bytes((4096, 4096), 4096) == 4096 + 16 and moment_bytes((4096,), 10) == 40
    for name in ("llama3-8b", "qwen3-32b", "mixtral-8x7b", "tiny"):
        assert all(cuts_a_block(PRESETS[name], tp) is None for tp in (1, 2, 4, 8)), name
    assert cuts_a_block(DENSE, 16) is not None


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *((one, DENSE) for one in LAYOUTS),
        *((one, EXPERTS) for one in ("ep=2,dp=2", "fsdp=4,ep=2,tp=2", "fsdp=8,ep=2", "fsdp=4,zero=1,ep=2")),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_no_layout_cuts_a_block(layout: str, model: Model) -> None:
    parsed = Layout.parse(layout)
    sharing = Sharing(model, parsed, 8, 2, 1 << 10, blockwise=True)
    seen = {one.name: torch.zeros(math.prod(one.shape), dtype=torch.bool) for one in llama_parameters(model)}
    for rank in range(parsed.world):
        for one in updated_ranges(sharing, rank):
            index = torch.arange(math.prod(one.box.whole)).view(one.box.whole)[one.box.slices].reshape(-1)
            mine = index[one.start : one.stop]
            seen[one.name][mine] = True
            block = block_length(one.box.whole)
            if block is not None:
                rows = mine.view(-1, block)
                assert torch.equal(rows[:, :1] // block * block, rows[:, :1]), one.name
                assert torch.equal(rows - rows[:, :1], torch.arange(block).expand_as(rows)), one.name
    assert all(bool(found.all()) for found in seen.values())


@pytest.mark.parametrize("code", [MEAN, SQUARE], ids=["mean", "square"])
def test_codes_and_values_turn_into_each_other(code: MomentCode) -> None:
    """Every code, under every scale: also under those of blocks that are almost nothing."""
    count = 256 if code.signed else 255
    every = torch.arange(count).to(torch.uint8).expand(252, count).contiguous()
    scale = torch.arange(1, 253).to(torch.uint8)
    values = decode(every, scale, code)
    zero = (every & code.codes) == 0
    normal = (values.abs() >= torch.finfo(torch.float32).tiny) | zero
    for drawn in (None, bits(3, torch.arange(every.numel())).view_as(every)):
        again = encode(values, scale, code, drawn)
        assert torch.equal(torch.where(zero, 0, again)[normal], torch.where(zero, 0, every)[normal])
    # Between neighbours an eighth of a power of two.
    ladder = decode(torch.arange(1, code.codes + 1).to(torch.uint8)[None], torch.tensor([126]), code)[
        0
    ].double()
    assert ladder[0] == code.lowest and ladder[-1] == 0.875
    steps = ladder[1:] / ladder[:-1]
    assert float(steps.min()) > 1.06 and float(steps.max()) <= 1.125


@pytest.mark.parametrize("code", [MEAN, SQUARE], ids=["mean", "square"])
def test_a_value_becomes_a_neighbour_and_on_average_itself(code: MomentCode) -> None:
    drawn = bits(5, torch.arange(1 << 16)).view(1, -1)
    for value in (0.9999, 0.93, 0.3, 1e-3, 1e-4):
        values = torch.full((1, 1 << 16), value)
        values[0, 0] = 1.0
        scale = scales(values)
        found = decode(encode(values, scale, code, drawn), scale, code)[0, 1:].double()
        low, high = sorted(set(found.tolist()))
        assert low < float(values[0, 1]) < high <= 1.125 * low
        assert (found.mean() - float(values[0, 1])) / (high - low) == pytest.approx(0, abs=0.01)
        nearest = decode(encode(values, scale, code, None), scale, code)[0, 1:]
        assert bool(((nearest - value).abs() <= 0.5001 * (high - low)).all())


def test_what_is_too_small_for_a_code() -> None:
    """A first moment is nothing or the least, by chance; a second moment never becomes nothing."""
    drawn = bits(5, torch.arange(1 << 16)).view(1, -1)
    values = torch.full((1, 1 << 16), -MEAN.lowest / 8)
    values[0, 0] = 0.6
    found = decode(encode(values, scales(values), MEAN, drawn), scales(values), MEAN)[0, 1:].double()
    assert float(found.mean()) == pytest.approx(-MEAN.lowest / 8, rel=0.05)
    values = torch.tensor([[0.6, SQUARE.lowest * 1e-3, 0.0, 1e-38]])
    for one in (drawn[:, :4], None):
        codes = encode(values, scales(values), SQUARE, one)
        assert codes[0, 1:].tolist() == [1, 0, 1]
    nothing = torch.zeros(2, 4)
    assert not decode(encode(nothing, scales(nothing), MEAN, None), scales(nothing), MEAN).any()


def updated(step: Step, model: Model, updates: int = 3, first: int = 1) -> None:
    for number in range(first, first + updates):
        for piece in step.pieces:
            piece.tensor.grad = torch.empty_like(piece.tensor)
            parts = [(piece.name, part) for part in piece_slices(piece, piece.tensor.grad)]
            fill(parts, model, seed=100 + number)
        set_learning_rate(step.optimizer, 0.01)
        clip_and_update(step.optimizer, step.pieces, torch.tensor(1.0), 0.0, math.inf, number)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_an_update_in_parts_is_the_update(rounding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, with parts of several blocks that divide no weight."""
    recipe = Recipe(**INT8, rounding=rounding, clip=0.0)
    whole, parted = (a_step(EXPERTS, recipe) for _ in range(2))
    updated(whole, EXPERTS)
    monkeypatch.setattr(blockwise_adamw, "ROUNDED_ELEMENTS", 700)
    updated(parted, EXPERTS)
    for one, other in zip(whole.pieces, parted.pieces, strict=True):
        assert torch.equal(one.tensor, other.tensor), one.name
        states = (step.optimizer.state[piece.tensor] for step, piece in ((whole, one), (parted, other)))
        for mine, theirs in zip(*(found.values() for found in states), strict=True):
            assert torch.equal(mine, theirs), one.name


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_an_update_is_adamws_within_the_precision_of_its_states(model: Model, rounding: Any) -> None:
    """torch's AdamW in fp64 from the same weights with the same gradients: after one update to bf16's precision, after
    three within an eighth of what they moved."""
    recipe = Recipe(**INT8, rounding=rounding, clip=0.0, weight_decay=0.1)
    step = a_step(model, recipe)
    assert isinstance(step.optimizer, BlockwiseAdamW)
    before = [piece.tensor.detach().double() for piece in step.pieces]
    weights = [torch.nn.Parameter(one.clone()) for one in before]
    oracle = torch.optim.AdamW(
        [
            {"params": [weight], "weight_decay": 0.1 if piece.decayed else 0.0}
            for weight, piece in zip(weights, step.pieces, strict=True)
        ],
        lr=0.01,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
    )
    for number in range(1, 4):
        updated(step, model, 1, number)
        for weight, piece in zip(weights, step.pieces, strict=True):
            weight.grad = piece.tensor.grad.double()
        oracle.step()
        if number == 1:
            for weight, piece in zip(weights, step.pieces, strict=True):
                error = (piece.tensor.detach().double() - weight).abs()
                assert bool((error <= 2.0**-7 * weight.abs() + 1e-6).all()), piece.name
    moved = torch.cat([(one - old).flatten() for one, old in zip(weights, before, strict=True)])
    off = torch.cat(
        [(p.tensor.detach().double() - one).flatten() for one, p in zip(weights, step.pieces, strict=True)]
    )
    assert float(off.detach().norm() / moved.detach().norm()) < 0.125
    for piece in step.pieces:
        state = step.optimizer.state[piece.tensor]
        kinds = {"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8} if piece.decayed else {}
        assert all(state[kind].dtype == dtype for kind, dtype in kinds.items())
        assert ("exp_avg_scale" in state) == piece.decayed


def kept(step: Step) -> dict[tuple[str, str], Tensor]:
    found = {
        (piece.name, kind): state.clone()
        for piece in step.pieces
        for kind, state in step.optimizer.state[piece.tensor].items()
    }
    return found | {(piece.name, "weight"): piece.tensor.detach().clone() for piece in step.pieces}


def test_a_refused_update_changes_nothing() -> None:
    step = a_step(DENSE, Recipe(**INT8))
    updated(step, DENSE)
    before = kept(step)
    clip_and_update(step.optimizer, step.pieces, torch.tensor(math.nan), 1.0, math.inf, 9)
    assert all(torch.equal(one, before[name]) for name, one in kept(step).items())


def test_a_second_moment_fades() -> None:
    """With a decay of 0.999 it loses far less than a code in each update."""
    for rounding, expected in (("stochastic", math.exp(-0.2)), ("nearest", 1.0)):
        step = a_step(DENSE, Recipe(**INT8, rounding=rounding, beta2=0.999))
        piece = next(one for one in step.pieces if one.decayed)
        for number in range(1, 202):
            piece.tensor.grad = torch.full_like(piece.tensor, float(number == 1))
            clip_and_update(step.optimizer, [piece], torch.tensor(1.0), 0.0, math.inf, number)
            state = step.optimizer.state[piece.tensor]
            block = block_length(piece.box.whole)
            found = decode(state["exp_avg_sq"].view(-1, block), state["exp_avg_sq_scale"], SQUARE)
            if number == 1:
                first = float(found.mean())
        assert float(found.mean()) / first == pytest.approx(expected, rel=0.02)


def test_what_does_not_go_with_blocks_is_named() -> None:
    for given, layout, what in (
        ({"optimizer": "lion"}, "dp=1", "with recipe.optimizer"),
        ({}, "offload=optimizer", "with layout: offload=optimizer"),
    ):
        config = Config.model_validate({"recipe": {"states": "int8", **given}})
        model = PRESETS["tiny"].model_copy(update={"heads": 16, "kv_heads": 16, "head_dim": 8})
        (problem,) = missing(config, model, Layout.parse(layout))
        assert what in problem.what and problem.fix
    assert not missing(Config.model_validate({"recipe": {"states": "int8"}}), DENSE, Layout.parse("tp=4"))
    many = PRESETS["tiny"].model_copy(update={"heads": 16, "kv_heads": 16, "head_dim": 8})
    recipe = Recipe(states="int8", batch=16)
    (problem,) = violations(Layout.parse("tp=16"), many, recipe)
    assert (
        "would cut blocks of model.layers.0.self_attn.o_proj.weight" in problem.what and "tp=8" in problem.fix
    )
    assert not violations(Layout.parse("tp=8"), many, recipe)
    assert not violations(Layout.parse("tp=16"), many, Recipe(states="bf16", batch=16))
