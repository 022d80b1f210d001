"""Lion, Muon and Adafactor against oracles: torch's own, the paper's formula, a decomposition into singular values."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import piece_slices
from shoal.train.muon import COEFFICIENTS, orthogonal
from shoal.train.optimizer import clip_and_update, set_learning_rate
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

SMALL = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "vocab": 50}
DENSE = PRESETS["tiny"].model_copy(update=SMALL)
EXPERTS = PRESETS["qwen3-30b-a3b"].model_copy(
    update={
        **SMALL,
        "experts": PRESETS["qwen3-30b-a3b"].experts.model_copy(update={"count": 4, "active": 2, "ffn": 12}),
    }
)
UPDATES, LR, DECAY = 4, 0.01, 0.1


def a_step(model: Model, recipe: Recipe) -> Step:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    first = partial(fill, model=model, seed=1)
    return assemble(blueprint(model, recipe), recipe, TuneSection(), mesh, first)


def matrices(values: Tensor) -> list[Tensor]:
    """Of a stack of experts each one, as its own parameter."""
    return list(values) if values.dim() == 3 else [values]


def train(step: Step, recipe: Recipe, model: Model) -> list[list[Tensor]]:
    """A few updates with gradients that are hashes; by update and parameter."""
    given = []
    for number in range(1, UPDATES + 1):
        for piece in step.pieces:
            piece.tensor.grad = torch.empty_like(piece.tensor)
            parts = [(piece.name, part) for part in piece_slices(piece, piece.tensor.grad)]
            fill(parts, model, seed=100 + number)
        given.append([piece.tensor.grad.clone() for piece in step.pieces])
        set_learning_rate(step.optimizer, LR)
        clip_and_update(step.optimizer, step.pieces, torch.tensor(1.0), 0.0, math.inf)
    return given


def run(model: Model, **recipe: object) -> tuple[Step, list[list[Tensor]], list[list[Tensor]]]:
    """The step after its updates, the gradients, and the weights before."""
    made = Recipe.model_validate({"precision": "fp64", "lr": LR, "weight_decay": DECAY, "seq": 8, **recipe})
    step = a_step(model, made)
    before = [[one.detach().clone() for one in matrices(piece.tensor)] for piece in step.pieces]
    return step, train(step, made, model), before


def assert_follows(
    step: Step, gradients: list[list[Tensor]], before: list[list[Tensor]], make: object
) -> None:
    """``make(weights, name)`` gives the oracle for one parameter's matrices."""
    for number, piece in enumerate(step.pieces):
        weights = [torch.nn.Parameter(one) for one in before[number]]
        oracle = make(weights, piece)  # type: ignore[operator]
        for update in gradients:
            for weight, gradient in zip(weights, matrices(update[number]), strict=True):
                weight.grad = gradient
            oracle.step()
        for weight, ours in zip(weights, matrices(piece.tensor), strict=True):
            assert torch.allclose(ours, weight, rtol=1e-12, atol=1e-14), piece.name


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_adafactor_is_torchs(model: Model) -> None:
    made = run(model, optimizer="adafactor")
    assert_follows(
        *made,
        lambda weights, piece: torch.optim.Adafactor(
            weights, lr=LR, weight_decay=DECAY if piece.decayed else 0.0
        ),
    )
    kept = {kind for piece in made[0].pieces for kind in made[0].optimizer.state[piece.tensor]}
    assert kept == {"row_var", "col_var", "variance", "step"}


class PlainLion:
    """As the paper has it, for one parameter."""

    def __init__(self, weights: list[torch.nn.Parameter], decay: float) -> None:
        self.weights, self.decay = weights, decay
        self.momentum = [torch.zeros_like(one) for one in weights]

    @torch.no_grad()
    def step(self) -> None:
        for weight, momentum in zip(self.weights, self.momentum, strict=True):
            direction = (0.9 * momentum + 0.1 * weight.grad).sign()
            weight -= LR * (direction + self.decay * weight)
            momentum.copy_(0.99 * momentum + 0.01 * weight.grad)


def test_lion_is_the_papers() -> None:
    made = run(DENSE, optimizer="lion", beta2=0.99)
    assert_follows(*made, lambda weights, piece: PlainLion(weights, DECAY if piece.decayed else 0.0))


class PlainMuon:
    """Momentum, with a polynomial of its singular values."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.weights, self.momentum = weights, [torch.zeros_like(one) for one in weights]

    @torch.no_grad()
    def step(self) -> None:
        for weight, momentum in zip(self.weights, self.momentum, strict=True):
            momentum.copy_(0.9 * momentum + 0.1 * weight.grad)
            left, values, right = torch.linalg.svd(0.1 * weight.grad + 0.9 * momentum, full_matrices=False)
            values = values / values.norm()
            a, b, c = COEFFICIENTS
            for _ in range(5):
                values = a * values + b * values**3 + c * values**5
            weight *= 1 - LR * DECAY
            weight -= LR * 0.2 * math.sqrt(max(weight.shape)) * (left * values) @ right


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_muon_moves_hidden_matrices_and_adamw_all_else(model: Model) -> None:
    made = run(model, optimizer="muon", adamw_lr=3 * LR)
    hidden = [
        piece.name for piece in made[0].pieces if "momentum_buffer" in made[0].optimizer.state[piece.tensor]
    ]
    assert {name.split(".")[1] for name in hidden} == {"layers"} and not any(
        "norm" in name for name in hidden
    )

    def oracle(weights: list[torch.nn.Parameter], piece: object) -> object:
        if piece.name in hidden:  # type: ignore[attr-defined]
            return PlainMuon(weights)
        decay = DECAY if piece.decayed else 0.0  # type: ignore[attr-defined]
        return torch.optim.AdamW(weights, lr=3 * LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)

    assert_follows(*made, oracle)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_the_iteration_is_torchs(shape: tuple[int, int]) -> None:
    """Torch's is in bf16 whatever it is given."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    ours.grad = theirs.grad = torch.randn(shape)
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.9, adjust_lr_fn="match_rms_adamw").step()
    scale = 0.2 * math.sqrt(max(shape))
    assert torch.allclose(scale * orthogonal(ours.grad.bfloat16()).float(), -theirs, atol=0.02)
    assert torch.allclose(scale * orthogonal(ours.grad), -theirs, atol=0.05 * scale)


@pytest.mark.parametrize("optimizer", ["lion", "muon", "adafactor"])
def test_a_refused_gradient_changes_nothing(optimizer: str) -> None:
    recipe = Recipe(optimizer=optimizer, lr=LR, seq=8)
    step = a_step(DENSE, recipe)

    def kept() -> list[Tensor]:
        states = [step.optimizer.state[piece.tensor] for piece in step.pieces]
        every = [one for state in states for one in state.values()]
        return [one.detach().clone() for one in (*every, *(piece.tensor for piece in step.pieces))]

    before = kept()
    for piece in step.pieces:
        piece.tensor.grad = torch.full_like(piece.tensor, math.nan)
    clip_and_update(step.optimizer, step.pieces, torch.tensor(math.nan), 1.0, math.inf)
    assert all(map(torch.equal, before, kept()))
    train(step, recipe, DENSE)
    assert not all(map(torch.equal, before, kept()))


def test_groups_have_their_own_rate_and_decay() -> None:
    """The first that matches decides; a decay that is said is for vectors too."""
    groups = [
        {"match": "*.q_proj.weight", "lr": 3 * LR, "weight_decay": 0.5},
        {"match": "*.self_attn.*", "lr": 2 * LR},
        {"match": "model.norm.weight", "weight_decay": 0.2},
    ]
    made = run(DENSE, optimizer="adamw", groups=groups)

    def oracle(weights: list[torch.nn.Parameter], piece: object) -> torch.optim.AdamW:
        name = piece.name  # type: ignore[attr-defined]
        lr, decay = LR, DECAY if piece.decayed else 0.0  # type: ignore[attr-defined]
        if name.endswith("q_proj.weight"):
            lr, decay = 3 * LR, 0.5
        elif ".self_attn." in name:
            lr = 2 * LR
        elif name == "model.norm.weight":
            decay = 0.2
        return torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)

    assert_follows(*made, oracle)
