"""Tensor and sequence parallelism: real ranks against one network in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.predict.sending import GEMMA2, GEMMA3
from tests.ranks import run_ranks
from torch import Tensor, nn

from shoal.facts import logits
from shoal.facts.model import Model
from shoal.facts.model.parameters import by_name, llama_parameters
from shoal.facts.model.tensor_split import Box, summed_over, tensor_part
from shoal.facts.targets import IGNORE
from shoal.models.decoder import Network, build
from shoal.models.documents import Documents
from shoal.models.initial import Slice, initialise
from shoal.models.random import key
from shoal.parallel import tensor_region
from shoal.parallel.tensor import split

SMALL: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 8,
    "ffn": 24,
    "vocab": 64,
    "max_positions": 32,
    "init_std": 0.3,
}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
GPT2 = {"norm": "layer", "gated": False, "activation": "gelu_tanh", "positions": "learned", **BIASES}
NEOX = {"norm": "layer", "gated": False, "parallel_residual": True, "rope_fraction": 0.25, **BIASES}


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any] = field(default_factory=dict)
    sp: bool = True
    dropout: float = 0.0
    z_loss: float = 0.0
    rows: int = 2
    logits_at_once: int = 2**27

    @property
    def model(self) -> Model:
        return Model(**{**SMALL, **self.changes})


BY_WORLD = {
    2: [
        Case({"heads": 8, "kv_heads": 4}),
        Case({"heads": 4, "kv_heads": 2, "vocab": 263, "window": 3}, dropout=0.2),
        Case({"tied": True}, z_loss=0.1, logits_at_once=32 * 5),
        Case({**GPT2, "tied": True, "vocab": 63}, dropout=0.1),
        Case({**NEOX}, dropout=0.1, rows=1),
        Case({"qk_norm": True, "kv_heads": 2}),
        Case({"qkv_bias": True, "kv_heads": 1}),
        Case({**GEMMA2, "kv_heads": 2}, z_loss=0.1, logits_at_once=32 * 5),
        Case({**GEMMA3, "window_layers": (0,)}, sp=False, dropout=0.1),
    ],
    4: [
        Case({"heads": 8, "kv_heads": 1, "vocab": 263}, logits_at_once=66 * 3),
        Case({"heads": 4, "kv_heads": 2, "qkv_bias": True, "qk_norm": True, "vocab": 5}, dropout=0.1),
        Case({**GPT2, "tied": True, "vocab": 5}, logits_at_once=2),
        Case({**NEOX, "vocab": 6}, z_loss=0.1),
        Case({**GEMMA2, "vocab": 5}, dropout=0.1),
    ],
}


@dataclass
class Outcome:
    loss: float
    count: int
    scores: Tensor
    gradients: dict[str, Tensor]


def batch(case: Case) -> dict[str, Any]:
    """Packed rows of two documents, with targets that partly do not count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, case.model.vocab, (case.rows, 8), generator=generator)
    targets = torch.randint(0, case.model.vocab, (case.rows, 8), generator=generator)
    targets[:, 4] = IGNORE
    return {
        "tokens": tokens,
        "positions": torch.arange(8).expand_as(tokens),
        "documents": Documents.of((torch.arange(8) > 4).long().expand_as(tokens)),
        "noise": torch.tensor([key(3, 1, f"row {row}") for row in range(case.rows)]),
        "targets": targets,
    }


def give_values(network: Network, slice_of: Callable[[str, nn.Parameter], Slice]) -> None:
    """The model's own first values, and something other than zeros and ones where it has those."""
    initialise(network, network.shape, 0, slice_of)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            local, whole, offset, *_ = slice_of(name, parameter)
            numbers = torch.linspace(-0.4, 0.6, whole[0], dtype=local.dtype)
            local.add_(numbers[offset[0] : offset[0] + len(local)])


def outcome(network: Network, case: Case) -> Outcome:
    given = batch(case)
    targets = given.pop("targets")
    loss, count = network.lm_head(network(**given), targets)
    (loss / 7).backward()
    with torch.no_grad():
        scores = network.lm_head.scores(network(given["tokens"], given["positions"]), 5)
    gradients = {name: one.grad for name, one in network.named_parameters() if one.grad is not None}
    return Outcome(float(loss.detach()), int(count), scores, gradients)


def in_one_process(case: Case) -> Outcome:
    network = build(case.model, case.dropout, torch.float64, "cpu", torch.float64, z_loss=case.z_loss)
    give_values(network, lambda name, one: Slice(one.data, tuple(one.shape), (0,) * one.dim()))
    return outcome(network, case)


def my_part(case: Case, rank: int, world: int) -> tuple[Network, dict[str, Box]]:
    network = build(case.model, case.dropout, torch.float64, "meta", torch.float64, z_loss=case.z_loss)
    names = [name for name, _ in network.named_parameters()]
    group = dist.group.WORLD
    assert group is not None
    split(network, case.model, world, rank, group, case.sp)
    assert [name for name, _ in network.named_parameters()] == names
    boxes = {one.name: tensor_part(one, world, rank).box for one in llama_parameters(case.model)}
    for name, parameter in network.named_parameters():
        assert parameter.is_meta and parameter.dtype == torch.float64
        assert tuple(parameter.shape) == boxes[name].shape, name
    network.to_empty(device="cpu")
    give_values(network, lambda name, one: Slice(one.data, boxes[name].whole, boxes[name].offset))
    return network, boxes


def tensor_parallel(rank: int, world: int, cases: list[Case]) -> list[tuple[Outcome, dict[str, Box]]]:
    """Every case, with the gradients of this rank's boxes."""
    outcomes = []
    for case in cases:
        logits.LOGITS_AT_ONCE = case.logits_at_once
        network, boxes = my_part(case, rank, world)
        outcomes.append((outcome(network, case), boxes))
    return outcomes


def put_together(name: str, parts: list[tuple[Box, Tensor]], case: Case) -> Tensor:
    """The whole gradient, summed where ``facts.boxes`` says so; elsewhere the copies of a box must agree."""
    summing = summed_over(by_name(case.model)[name], len(parts), case.sp) is not None
    whole = torch.full(parts[0][0].whole, torch.nan, dtype=torch.float64)
    for box, gradient in parts:
        copies = torch.stack([one for other, one in parts if other == box])
        assert summing or torch.allclose(copies, gradient, rtol=1e-12, atol=1e-13), name
        whole[box.slices] = copies.sum(0) if summing else gradient
    return whole


@pytest.mark.parametrize("world", [2, 4])
def test_loss_gradients_and_scores_are_those_of_one_process(world: int) -> None:
    cases = [replace(case, sp=sp) for case in BY_WORLD[world] for sp in (True, False)]
    for case, ranks in zip(cases, zip(*run_ranks(world, tensor_parallel, cases), strict=True), strict=True):
        wanted = in_one_process(case)
        first, _ = ranks[0]
        assert first.loss == pytest.approx(wanted.loss, rel=1e-13), case
        assert torch.allclose(first.scores, wanted.scores, rtol=1e-12, atol=1e-12), case
        for got, _ in ranks:
            assert got.loss == first.loss and got.count == wanted.count
            assert torch.equal(got.scores, first.scores)
            assert got.gradients.keys() == wanted.gradients.keys()
        for name, gradient in wanted.gradients.items():
            parts = [(boxes[name], got.gradients[name]) for got, boxes in ranks]
            difference = (put_together(name, parts, case) - gradient).abs().max()
            assert difference <= 1e-12 * size(name, wanted.gradients), (name, case)


def size(name: str, gradients: dict[str, Tensor]) -> Tensor:
    """What a gradient's error is measured against: its largest element.

    The keys' bias shifts all scores of a query alike where nothing rotates them, so its gradient is nothing but
    rounding; the queries' is of the size that it would have.
    """
    return gradients[name.replace("k_proj.bias", "q_proj.bias")].abs().max()


def counted(rank: int, world: int, cases: list[Case]) -> list[tuple[Counter[str], Counter[str]]]:
    """The collectives of a forward and of a backward pass."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    tensor_region.all_gather_single = counting("gather", tensor_region.all_gather_single)
    tensor_region.reduce_scatter_single = counting("scatter", tensor_region.reduce_scatter_single)
    dist.all_reduce = counting("reduce", dist.all_reduce)
    results = []
    for case in cases:
        logits.LOGITS_AT_ONCE = case.logits_at_once
        network, _ = my_part(case, rank, world)
        given = batch(case)
        targets = given.pop("targets")
        calls.clear()
        loss, _ = network.lm_head(network(**given), targets)
        forward = Counter(calls)
        calls.clear()
        loss.backward()
        results.append((forward, Counter(calls)))
    return results


@pytest.mark.parametrize("changes", [{}, NEOX], ids=["in sequence", "in parallel"])
def test_two_gathers_and_two_scatters_a_block_and_their_mirror_images(changes: dict[str, Any]) -> None:
    layers, ends = 2 * SMALL["layers"], 1
    in_chunks = Case(changes, logits_at_once=32 * 5)  # 16 tokens, 5 at once
    cases = [Case(changes), in_chunks, Case(changes, sp=False)]
    split_tokens, chunks, all_tokens = run_ranks(2, counted, cases)[0]
    both = layers + ends
    assert split_tokens == ({"gather": both, "scatter": both, "reduce": 2}, {"gather": both, "scatter": both})
    # Chunks are computed again in the backward pass, but what the ranks told each other is not asked again.
    assert chunks == ({"gather": both, "scatter": both, "reduce": 2 * 4}, {"gather": both, "scatter": both})
    assert all_tokens == ({"reduce": both + 2}, {"reduce": both})


def pruned(model: Model, layers: list[str], rank: int, world: int, sp: bool) -> Network:
    """One of two pipeline stages, as the pipeline leaves it; the last has a head of its own."""
    network: Any = build(model, 0.1, torch.float64, "meta", torch.float64)
    decoder = network.model
    if "0" in layers:
        decoder.norm = network.lm_head = None
    else:
        network.lm_head.weight = nn.Parameter(torch.empty_like(network.lm_head.matrix()))
        network.lm_head.tied = ()
        decoder.embed_tokens = decoder.embed_positions = None
    for name in set(decoder.layers) - set(layers):
        del decoder.layers[name]
    group = dist.group.WORLD
    assert group is not None
    split(network, model, world, rank, group, sp)

    def slice_of(name: str, parameter: nn.Parameter) -> Slice:
        box = tensor_part(by_name(model)[name], world, rank).box
        return Slice(parameter.data, box.whole, box.offset)

    give_values(network.to_empty(device="cpu"), slice_of)
    return network


def in_two_stages(rank: int, world: int, case: Case) -> list[tuple[float, Tensor]]:
    """The loss, and the gradient of the embedding's rows here, of which either stage has a part."""
    results = []
    for sp in (True, False):
        first, last = (pruned(case.model, [layer], rank, world, sp) for layer in "01")
        with torch.no_grad():
            last.lm_head.weight.copy_(first.model.embed_tokens.weight)
        given = batch(case)
        targets = given.pop("targets")
        hidden = first(**given)
        assert hidden.shape[1] == (8 // world if sp else 8)
        loss, _ = last.lm_head(last(**{**given, "tokens": hidden}), targets)
        (loss / 7).backward()
        embedding, head = first.model.embed_tokens.weight.grad, last.lm_head.weight.grad
        assert embedding is not None and head is not None
        results.append((float(loss.detach()), embedding + head))
    return results


def test_stages_of_a_pipeline_are_split_alike() -> None:
    case = Case({**GPT2, "tied": True, "vocab": 63}, dropout=0.1)
    wanted = in_one_process(case)
    by_rank = run_ranks(2, in_two_stages, case)
    for results in zip(*by_rank, strict=True):
        assert [loss for loss, _ in results] == pytest.approx([wanted.loss] * 2, rel=1e-13)
        whole = torch.cat([gradient for _, gradient in results])
        assert torch.allclose(whole, wanted.gradients["model.embed_tokens.weight"], rtol=1e-11, atol=1e-13)


def half_precision(rank: int, world: int, cases: list[Case]) -> list[float]:
    """bf16 activations of fp32 parameters."""
    losses = []
    for case in cases:
        network, _ = my_part(case, rank, world)
        network.to(torch.float32)
        network.model.embed_tokens.compute = network.model.compute = torch.bfloat16
        given = batch(case)
        targets = given.pop("targets")
        hidden = network(**given)
        loss, _ = network.lm_head(hidden, targets)
        loss.backward()
        assert hidden.dtype == torch.bfloat16 and loss.dtype == torch.float32
        assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in network.parameters())
        losses.append(float(loss.detach()))
    return losses


def test_half_precision_activations_give_single_precision_losses_and_gradients() -> None:
    cases = [Case({"vocab": 263}, sp=sp) for sp in (True, False)]
    wanted = in_one_process(cases[0]).loss
    for losses in run_ranks(2, half_precision, cases):
        assert losses == pytest.approx([wanted] * 2, rel=0.05)
