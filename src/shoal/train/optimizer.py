"""Build the optimizer and its parameter groups; gradient clipping; fp16 loss scaling; the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.facts.blockwise import block_length
from shoal.facts.optimizers import Rule, rule_of
from shoal.facts.recipe import Recipe
from shoal.parallel.shards import Shard, gradient
from shoal.parallel.whole_matrices import WholeMatrices
from shoal.train.adafactor import Adafactor
from shoal.train.adamw import AdamW
from shoal.train.blockwise_adamw import BlockwiseAdamW
from shoal.train.device_controlled import DeviceControlledOptimizer
from shoal.train.lion import Lion
from shoal.train.muon import Muon
from shoal.train.norm_kernel import summed_squares
from shoal.train.rounded_sgd import RoundedSGD
from shoal.train.rounding import StochasticRounding

# The same as in torch's clipping.
CLIP_EPS = 1e-6
# A group's learning rate as a fraction of the recipe's, whose schedule it follows.
LR_SHARE = "lr_share"
# The dtype in which Muon orthogonalises matrices: the compute dtype, except for fp16, whose range is too small
# (``facts.precision.orthogonal_width``).
ORTHOGONAL = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}


def build(pieces: list[Shard], recipe: Recipe, whole: WholeMatrices | None = None) -> torch.optim.Optimizer:
    """Build the optimizer. Pieces with the same options form a group: norms and biases, the vectors, usually have no
    weight decay.

    ``whole``: for optimizers that work on whole matrices (``facts.optimizers.WHOLE``).
    """
    by_options: dict[tuple[Rule, float, float], list[Tensor]] = {}
    for piece in sorted(pieces, key=lambda piece: not piece.decayed):
        options = _options(piece, recipe)
        by_options.setdefault(options, []).append(piece.tensor)
    lr = recipe.peak_lr
    groups: dict[Rule, list[dict[str, Any]]] = {}
    for (rule, decay, share), weights in by_options.items():
        group = {"params": weights, "weight_decay": decay, "lr": lr * share, LR_SHARE: share}
        groups.setdefault(rule, []).append(group)
    # With many ranks, one may hold nothing: the rows of every parameter may all be on other ranks.
    rounding = StochasticRounding(pieces, recipe.seed) if recipe.rounds_by_chance else None
    nothing: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.empty(0))]}]
    adamw: AdamW | None = None
    if "adamw" in groups or recipe.optimizer == "adamw":
        working: dict[Tensor, Tensor] = {
            piece.tensor: piece.working for piece in pieces if piece.working is not None
        }
        betas = recipe.beta1, recipe.beta2
        own_groups = groups.get("adamw", nothing)
        if recipe.blockwise:
            lengths = {piece.tensor: block_length(piece.box.whole) for piece in pieces}
            blocks: dict[Tensor, int] = {
                weight: length for weight, length in lengths.items() if length is not None
            }
            adamw = BlockwiseAdamW(own_groups, blocks, working, rounding, lr=lr, betas=betas, eps=recipe.eps)
        else:
            away = {piece.tensor for piece in pieces if piece.away is not None}
            adamw = AdamW(own_groups, working, away, rounding, lr=lr, betas=betas, eps=recipe.eps)
    own = groups.get(recipe.optimizer, nothing)
    if recipe.optimizer == "sgd":
        return _sgd(own, pieces, recipe, rounding)
    steered: DeviceControlledOptimizer
    if recipe.optimizer == "lion":
        steered = Lion(own, lr=lr, betas=(recipe.beta1, recipe.beta2))
    elif recipe.optimizer == "muon":
        assert whole is not None
        dtype = ORTHOGONAL[recipe.precision]
        steered = Muon(own, adamw, whole, lr=lr, momentum=recipe.momentum, dtype=dtype)
    elif recipe.optimizer == "adafactor":
        assert whole is not None
        steered = Adafactor(own, whole, lr=lr)
    else:
        assert adamw is not None
        start_filed(adamw, pieces)
        return adamw
    steered.rounding = rounding
    return steered


def _sgd(
    groups: list[dict[str, Any]], pieces: list[Shard], recipe: Recipe, rounding: StochasticRounding | None
) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer
    if rounding is None:
        optimizer = torch.optim.SGD(groups, lr=recipe.peak_lr, momentum=recipe.momentum, fused=True)
    else:
        optimizer = RoundedSGD(groups, lr=recipe.peak_lr, momentum=recipe.momentum)
        optimizer.rounding = rounding
    if recipe.momentum:
        start_momentum(optimizer, pieces)
    return optimizer


def _options(piece: Shard, recipe: Recipe) -> tuple[Rule, float, float]:
    """What decides a piece's group: its rule, its weight decay, and its fraction of the learning rate."""
    name, dimensions = piece.name, len(piece.box.whole)
    rule = rule_of(recipe.optimizer, name, dimensions)
    return rule, recipe.decay_of(name, dimensions), recipe.lr_share(name, dimensions)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SHARE, 1.0)


def writes_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update also writes the network's working copies."""
    return isinstance(optimizer, AdamW) and optimizer.writes_copies


def start_momentum(optimizer: torch.optim.Optimizer, pieces: list[Shard]) -> None:
    """Start momentum at zero. Torch would create it in the first update, and leave it uninitialised if that update
    is refused.
    """
    for piece in pieces:
        begun = (
            torch.zeros_like(piece.tensor) if piece.filed is None else piece.filed.begin("momentum_buffer")
        )
        optimizer.state[piece.tensor]["momentum_buffer"] = begun


def start_filed(adamw: AdamW, pieces: list[Shard]) -> None:
    """Start the moments of pieces in files at zero: torch would allocate memory for them in the first update."""
    for piece in pieces:
        if piece.filed is not None:
            adamw.state[piece.tensor]["step"] = torch.zeros(())
            for kind in ("exp_avg", "exp_avg_sq"):
                adamw.state[piece.tensor][kind] = piece.filed.begin(kind)


def unscale(pieces: list[Shard], scale: float) -> None:
    """Divide the gradients by the loss scale."""
    if scale != 1.0:
        for piece in pieces:
            gradient(piece).div_(scale)


def squared_norm(pieces: list[Shard], device: torch.device) -> Tensor:
    """The sum of squares of these gradients, in fp64 on their device, without synchronising.

    Accumulated in at least fp32: torch's own total has the gradients' dtype.
    """
    squares = [piece.squares for piece in pieces if piece.squares is not None]  # of gradients that have left
    gradients = [gradient(piece) for piece in pieces if piece.squares is None]
    # Gradients accumulated on the host are measured there.
    for here in (True, False):
        some = [one for one in gradients if (one.device == device) == here]
        if some:
            squares.append(_squares(some).to(device))
    if not squares:
        # Torch's empty total would be on the CPU, and moving it to the device would synchronise.
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(squares).sum() if len(squares) > 1 else squares[0]


def _squares(gradients: list[Tensor]) -> Tensor:
    found = summed_squares(gradients)
    return _norm(gradients).double().square() if found is None else found


def _norm(gradients: list[Tensor]) -> Tensor:
    if any(one.dtype.itemsize < 4 for one in gradients):
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
    return torch.nn.utils.get_total_norm(gradients)


def refuses(norm: Tensor, most: float) -> Tensor:
    """Whether gradients of this norm are refused, decided on the norm's device."""
    return ~(torch.isfinite(norm) & (norm <= most))


def clip_and_update(
    optimizer: torch.optim.Optimizer,
    pieces: list[Shard],
    norm: Tensor,
    limit: float,
    most: float,
    step: int = 0,
) -> None:
    """Update with gradients whose norm over all ranks is ``norm``, clipped to ``limit`` (0: no clipping).

    ``step`` numbers the update: stochastic rounding draws from it.

    If the norm is not finite, or above ``most``, weights and states stay unchanged. The device decides that, so the
    host does not synchronise: torch's fused optimizers divide gradients by ``grad_scale`` in the pass that updates, and
    do nothing where ``found_inf`` is 1. torch's GradScaler uses the same interface.
    """
    steered: Any = optimizer
    refused = refuses(norm, most)
    steered.found_inf, steered.grad_scale = refused.float(), None
    if (rounding := getattr(optimizer, "rounding", None)) is not None:
        rounding.step = step
    if limit and pieces:
        if pieces[0].tensor.dtype == torch.float64:  # a scale is fp32, too coarse for it
            # Refused gradients stay as they are: they show which rank is at fault.
            sound = torch.where(refused, 0.0, norm)
            torch.nn.utils.clip_grads_with_norm_([piece.tensor for piece in pieces], limit, sound)
        else:
            steered.grad_scale = ((norm + CLIP_EPS) / limit).clamp(min=1.0).float()
    optimizer.step()


@dataclass
class LossScale:
    """The loss scale of fp16, without which small gradients underflow. Halved on overflow, doubled after a run of steps
    without one.

    torch's GradScaler keeps the same two numbers, but unscales separately from clipping, and decides about overflow per
    rank; ours decides from the norm of the reduced gradients, which every rank shares.
    """

    value: float = 1.0
    quiet: int = 0  # steps since the last overflow
    patience: int = 2000
    enabled: bool = False

    @classmethod
    def for_precision(cls, precision: str) -> LossScale:
        return cls(value=2.0**16, enabled=True) if precision == "fp16" else cls()

    def update(self, overflow: bool) -> None:
        if not self.enabled:
            return
        self.quiet = 0 if overflow else self.quiet + 1
        if overflow:
            self.value /= 2
        elif self.quiet % self.patience == 0:
            self.value *= 2


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of update number ``step``, from 1. Warm-up is linear and reaches the peak at its last step."""
    warmup = recipe.warmup_steps
    if step <= warmup:
        return recipe.peak_lr * (step / warmup)  # in this order of operations the last is exactly the peak
    floor = recipe.lr_min
    return recipe.peak_lr * (floor + (1 - floor) * _shape(recipe, step - warmup, recipe.steps - warmup))


def _shape(recipe: Recipe, step: int, steps: int) -> float:
    """The schedule's factor for ``step`` in 1..``steps``: from 1 at the end of the warm-up to 0 at the end of the
    run.
    """
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "wsd":  # warm-up, stable, decay
        left, decay = steps - step, recipe.decay_steps
        return min(1.0, left / decay) if decay else 1.0
    done = step / steps
    return 1 - done if recipe.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
