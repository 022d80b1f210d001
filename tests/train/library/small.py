"""What the tests of the library share: small models and data, a run on real ranks, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import shoal
from shoal.facts.model.tensor_split import Box
from shoal.parallel.shards import piece_boxes

ROWS, BATCH, SEQ, VOCAB = 24, 8, 10, 97
STEPS = 3
IMAGES = ("vision", "batchnorm")


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.norm(self.first(x))))


class Vision(nn.Module):
    """A network of images, with a scalar and a part that no loss reaches."""

    def __init__(self, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        # A batch norm takes a bias away again, and leaves its gradient nothing but noise.
        self.stem = nn.Conv2d(3, 6, 3, stride=2, bias=norm is nn.Identity)
        self.norm = norm(6)
        self.stages = nn.Sequential(Residual(6), Residual(6), Residual(6))
        self.head = nn.Linear(6, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.temperature * self.head(self.stages(self.norm(self.stem(images))).mean((2, 3)))


def image_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """transformers' own loss is computed in fp32, whatever the model is."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def exact_norm(norm: Any, hidden: Tensor) -> Tensor:
    """So are its norms."""
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def exact_router(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """And Mixtral's routers."""
    logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    weights, chosen = logits.softmax(-1).topk(router.top_k)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def build(kind: str, exact: bool = True) -> nn.Module:
    torch.manual_seed(5)
    if kind == "vision":
        return Vision().double()
    if kind == "batchnorm":
        return Vision(nn.BatchNorm2d).double()
    if kind in ("llama", "qwen3", "mixtral"):
        families: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "mixtral": MixtralConfig}
        family = families[kind]
        config: Any = family(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ,
            head_dim=4,
            tie_word_embeddings=kind == "qwen3",
            **({"num_local_experts": 4, "experts_implementation": "eager"} if kind == "mixtral" else {}),
        )
    else:
        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=SEQ,
            n_embd=16,
            n_layer=3,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    transformers.logging.set_verbosity_error()
    model: Any = AutoModelForCausalLM.from_config(config)
    if exact:
        model.loss_function = exact_loss
        for one in model.modules():
            if isinstance(one, LlamaRMSNorm | Qwen3RMSNorm | MixtralRMSNorm):
                one.forward = partial(exact_norm, one)
            elif isinstance(one, MixtralTopKRouter):
                one.forward = partial(exact_router, one)
    return model.double()


def rows(kind: str) -> list[Any]:
    """Different numbers of targets in different rows."""
    generator = torch.Generator().manual_seed(7)
    found: list[Any] = []
    for number in range(ROWS):
        if kind in IMAGES:
            image = torch.randn(3, 9, 9, generator=generator, dtype=torch.float64)
            found.append((image, torch.tensor(number % 5)))
            continue
        tokens = torch.randint(0, VOCAB, (SEQ,), generator=generator)
        labels = tokens.clone()
        labels[: number % (SEQ - 2)] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # AdamW divides by a gradient's own size. That of GPT-2's biases of keys is zero but for rounding, which differs
    # with the order of a sum (and the processor): eps=1e-8 would make steps of 1e-10 out of it, 1e-6 of 1e-12.
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@dataclass(frozen=True)
class Case:
    kind: str
    layout: str
    clip: float | None = None
    own: str = ""  # how the script has its own loss: "count", "mean"
    shuffle: bool = False
    wrap: Any = None
    plan: tuple[tuple[str, str], ...] = ()
    scheduled: bool = False

    def __str__(self) -> str:
        return " ".join(str(word) for word in (self.kind, self.layout, self.own, self.wrap or "") if word)


@dataclass(frozen=True)
class Piece:
    name: str
    boxes: list[Any]
    counted: bool
    value: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    pieces: list[Piece]


def pieces_of(run: shoal.Run) -> list[Piece]:
    assert run.placed is not None
    found = []
    for piece in run.placed.pieces:
        boxes = [box for box, _ in piece_boxes(piece, 0, piece.stop - piece.start)]
        made = run.updated[piece].grad
        gradient = None if made is None else made.reshape(-1).clone()
        found.append(
            Piece(piece.name, boxes, piece.counted, piece.tensor.detach().reshape(-1).clone(), gradient)
        )
    return found


def train(rank: int, world: int, case: Case, steps: int = STEPS) -> Result:
    """As a script does it."""
    with shoal.run(case.layout, clip=case.clip, batch=BATCH) as run:
        model = build(case.kind)
        if rank:
            with torch.no_grad():  # as random weights would differ
                for parameter in model.parameters():
                    parameter += 1
        data = rows(case.kind)
        model, optimizer, loader = run.prepare(
            model,
            optimizer_of(model),
            data,
            shuffle=case.shuffle,
            wrap=case.wrap,
            plan=dict(case.plan) or None,
        )
        losses, norms = [], []
        for batch in run.steps(loader, total=steps):
            if case.own:
                optimizer.zero_grad()  # as scripts have it
                loss = own_loop(run, model, batch, case)
            else:
                loss = run.step(model, batch, loss=image_loss if case.kind in IMAGES else None)
            losses.append(float(loss))
            norms.append(float(run.grad_norm))
        return Result(losses, norms, pieces_of(run))


def own_loop(run: shoal.Run, model: nn.Module, batch: Any, case: Case) -> Tensor:
    rows = len(batch["input_ids"])
    micro = run.layout.micro or rows
    for start in range(0, rows, micro):
        part = {key: value[start : start + micro] for key, value in batch.items()}
        count = int((part["labels"][:, 1:] != -100).sum())
        mean = model(**part).loss
        if case.own == "count":
            run.backward(mean * count, count=count, last=start + micro == rows)
        else:
            run.backward(mean)
    return run.update()


def plain(
    case: Case, steps: int = STEPS, order: Callable[[int], Iterable[int]] | None = None, parts: int = 1
) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor | None]]:
    """One process, whole batches, plain PyTorch. ``parts``: equal ones, whose means weigh the same."""
    model, data = build(case.kind), rows(case.kind)
    optimizer = optimizer_of(model)
    scheduler = schedule_of(optimizer) if case.scheduled else None
    losses, norms = [], []
    gradients: dict[str, Tensor | None] = {}
    for step in range(steps):
        numbers = list(order(step)) if order else [(step * BATCH + place) % ROWS for place in range(BATCH)]
        optimizer.zero_grad()
        total = 0.0
        for part in range(parts):
            own = numbers[part * BATCH // parts : (part + 1) * BATCH // parts]
            batch = torch.utils.data.default_collate([data[number] for number in own])
            if case.kind in IMAGES:
                loss = F.cross_entropy(model(batch[0]), batch[1])
            else:
                loss = model(**batch).loss
            (loss / parts).backward()
            total += float(loss.detach()) / parts
        norms.append(
            float(nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))
        )
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        gradients = {name: one.grad for name, one in model.named_parameters()}
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    values = {name: one.detach() for name, one in model.named_parameters()}
    return losses, norms, values, gradients


def assert_same(results: list[Result], expected: Any, tolerance: float = 1e-12) -> None:
    """On every rank: losses, norms, pieces of parameters and gradients; those that count are every element once."""
    losses, norms, values, gradients = expected
    seen = {name: torch.zeros(value.shape) for name, value in values.items()}
    for result in results:
        for found, wanted in ((result.losses, losses), (result.norms, norms)):
            assert len(found) == len(wanted)
            for one, other in zip(found, wanted, strict=True):
                assert abs(one - other) <= tolerance * max(1, abs(other)), (found, wanted)
        for piece in result.pieces:
            begin = 0
            for offset, shape in piece.boxes:
                box = Box(tuple(values[piece.name].shape), offset, shape)
                here = slice(begin, begin + box.size)
                begin += box.size
                whole = values[piece.name]
                assert_near(piece.name, piece.value[here], whole[box.slices], whole, tolerance)
                wanted_gradient = gradients[piece.name]
                assert (piece.gradient is None) == (wanted_gradient is None), piece.name
                if piece.gradient is not None and wanted_gradient is not None:
                    part = wanted_gradient[box.slices]
                    assert_near(piece.name, piece.gradient[here], part, wanted_gradient, tolerance)
                if piece.counted:
                    seen[piece.name][box.slices] += 1
    for name, count in seen.items():
        assert (count == 1).all(), name


def assert_near(name: str, found: Tensor, wanted: Tensor, whole: Tensor, tolerance: float) -> None:
    difference = (found - wanted.reshape(-1)).abs().max() / whole.abs().max().clamp(min=1e-3)
    assert difference <= tolerance, (name, float(difference))
