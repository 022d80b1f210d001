"""The operators that are priced one by one are those that the running network starts, with the bytes they move."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.facts.cluster.attention_kernels import repeats_keys
from shoal.facts.layout import Recompute
from shoal.facts.model import Model
from shoal.models import cross_entropy
from shoal.models.decoder import Network, build
from shoal.models.rotary import tables
from shoal.parallel.recompute import recompute
from shoal.predict.time import operators
from shoal.predict.time.operators import OperatorWork, Tokens, Widths

LLAMA = Model(
    name="small", family="llama", layers=1, hidden=128, heads=8, kv_heads=4, head_dim=16, ffn=256, vocab=192,
    max_positions=64,
)  # fmt: skip
# Biases, layer norms, learned positions, a plain MLP.
GPT2 = LLAMA.model_copy(
    update={
        "family": "gpt2",
        "kv_heads": 8,
        "positions": "learned",
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }
)
QWEN3 = LLAMA.model_copy(update={"family": "qwen3", "qk_norm": True})
MODELS = {"llama": LLAMA, "gpt2": GPT2, "qwen3": QWEN3}
ROWS, SEQ = 1, 32
TOKENS = ROWS * SEQ
# Of the bytes that move, vectors and numbers a row, which are not counted, are less than this share.
SMALL = 0.03


# Arguments of which only a few numbers are read.
PICKED_FROM = {
    "aten.embedding.default": 0,
    "aten.nll_loss_forward.default": 0,
    "aten.nll_loss_backward.default": 1,
}


class Started(NamedTuple):
    operator: str
    bytes: int

    @property
    def multiplies(self) -> bool:
        return self.operator.startswith(("aten.mm", "aten.addmm", "aten._scaled_dot_product"))


# How often each passes over its result.
WIDE_PRODUCTS = {"shoal.wide_product.default": 1, "shoal.add_product_.default": 2}


class Counter(TorchDispatchMode):
    """Every operator that is started, with the bytes it reads and writes; views start none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Started] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        picked = PICKED_FROM.get(str(func))
        read = [one for place, one in enumerate(args) if place != picked]
        # What is changed in place, and not handed back, is written as well.
        written = [
            tensor
            for one, tensor in zip(func._schema.arguments, args, strict=False)
            if one.is_write and not func._schema.returns
        ]
        tensors = [one for one in tree_leaves((read, kwargs, out, written)) if isinstance(one, Tensor)]
        looks = any(
            one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns
        )
        moves_nothing = looks or any(name in str(func) for name in ("_unsafe_view", "empty_like"))
        if str(func) in WIDE_PRODUCTS:
            # Products: what they move beyond what one in the compute precision would.
            total, narrow = (args[0] if out is None else out), args[-1].itemsize
            beyond = WIDE_PRODUCTS[str(func)] * total.itemsize - narrow
            self.seen.append(Started(f"wide {func}", total.numel() * beyond))
        elif tensors and not moves_nothing:
            self.seen.append(Started(str(func), sum(map(distinct, tensors))))
        return out

    @property
    def moved(self) -> int:
        return sum(one.bytes for one in self.seen if not one.multiplies)


def distinct(tensor: Tensor) -> int:
    """Bytes of a tensor; where it is spread over a dimension, those that lie in memory."""
    count = 1
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if step else 1
    return count * tensor.itemsize


DTYPES = {2: torch.bfloat16, 4: torch.float32}


def network_of(model: Model, widths: Widths) -> Network:
    network = build(model, compute=DTYPES[widths.compute], device="cpu", dtype=DTYPES[widths.states])
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return network


def run_block(model: Model, widths: Widths, kind: Recompute) -> tuple[Counter, Counter]:
    compute, network = DTYPES[widths.compute], network_of(model, widths)
    positions = torch.arange(SEQ).expand(ROWS, SEQ)
    rotation = tables(model, None, positions, compute) if model.positions == "rotary" else None
    hidden = torch.randn(ROWS, SEQ, model.hidden, dtype=compute).requires_grad_()
    grad = torch.randn_like(hidden)
    block = network.model.layers["0"]
    recompute([block], kind)
    with Counter() as forward:
        output = block(hidden, rotation, positions, None, None)
    with Counter() as backward:
        output.backward(grad)
    return forward, backward


def size(works: list[OperatorWork]) -> float:
    return sum(work.bytes for work in works)


def expected(model: Model, widths: Widths) -> tuple[operators.BlockOperators, float]:
    """A block's operators, and the bytes of its matrices' casts."""
    mine = Tokens(TOKENS, TOKENS, model.heads * model.head_dim, model.kv_heads * model.head_dim, model.ffn)
    hidden, query, key = model.hidden, mine.query, mine.key
    matrices = 2 * hidden * query + 2 * hidden * key + (3 if model.gated else 2) * hidden * model.ffn
    each = widths.states + widths.compute if widths.casts else 0
    return operators.block(model, mine, widths), float(matrices * each)


def of(model: Model, widths: Widths) -> Model:
    """Where keys are repeated for the heads that share them, that belongs to attention, which is measured whole."""
    return model.model_copy(update={"kv_heads": model.heads}) if repeats_keys(widths.compute) else model


PRECISIONS = {"bf16": Widths(2, 4), "fp32": Widths(4, 4), "pure bf16": Widths(2, 2)}


@pytest.mark.filterwarnings("ignore:mkldnn")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_block_starts_what_is_priced(name: str, precision: str) -> None:
    widths = PRECISIONS[precision]
    model = of(MODELS[name], widths)
    forward, backward = run_block(model, widths, "none")
    counts = operators.operators(model, widths)
    assert (len(forward.seen), len(backward.seen)) == counts
    block, casts = expected(model, widths)
    assert forward.moved == pytest.approx(size(block.forward) + casts, rel=SMALL)
    assert backward.moved == pytest.approx(size(block.backward) + casts, rel=SMALL)


@pytest.mark.filterwarnings("ignore:mkldnn")
@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_recomputation_repeats_what_is_priced(precision: str, kind: Recompute) -> None:
    """All but the last product and what follows it; selectively also no other product."""
    widths = PRECISIONS[precision]
    model = of(LLAMA, widths)
    _, plain = run_block(model, widths, "none")
    _, repeated = run_block(model, widths, kind)
    block, casts = expected(model, widths)
    again = size(block.forward) - size(block.last) + casts
    # What selective recomputation kept is handed out again as views, which move nothing.
    assert repeated.moved - plain.moved == pytest.approx(again, rel=SMALL)
    more = sum(one.multiplies for one in repeated.seen) - sum(one.multiplies for one in plain.seen)
    # Attention is computed again either way.
    assert more == 1 + (6 if kind == "full" else 0)


@pytest.mark.filterwarnings("ignore:mkldnn")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("at_once", [TOKENS, TOKENS // 4])
def test_the_head_starts_what_is_priced(
    precision: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, and in chunks."""
    for module in (cross_entropy, operators):
        monkeypatch.setattr(module, "tokens_at_once", lambda rows: at_once)
    widths = PRECISIONS[precision]
    # With so many logits a token that its few numbers are next to nothing.
    model = LLAMA.model_copy(update={"vocab": 1024})
    network = network_of(model, widths)
    hidden = torch.randn(ROWS, SEQ, LLAMA.hidden, dtype=DTYPES[widths.compute]).requires_grad_()
    targets = torch.randint(model.vocab, (ROWS, SEQ))
    network.lm_head.start_step(1.0, cross_entropy.PendingWeightGradient())
    with Counter() as forward:
        total, _ = network.lm_head(network.model.norm(hidden), targets)
    with Counter() as backward:
        total.backward()
    ends = operators.head(model, TOKENS, model.vocab, widths)
    assert forward.moved == pytest.approx(size(ends.forward), rel=SMALL)
    assert backward.moved == pytest.approx(size(ends.backward), rel=SMALL)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_embedding_starts_what_is_priced(name: str, precision: str) -> None:
    model, widths = MODELS[name], PRECISIONS[precision]
    network = network_of(model, widths)
    tokens = torch.randint(model.vocab, (ROWS, SEQ))
    positions = torch.arange(SEQ).expand(ROWS, SEQ)
    with Counter() as forward:
        hidden = network.model.embed(tokens, positions, None)
    grad = torch.randn_like(hidden)
    with Counter() as backward:
        hidden.backward(grad)
    ends = operators.embedding(model, TOKENS, model.vocab, widths, joined=False)
    looked_up = TOKENS * model.hidden * widths.states * (2 if model.positions == "learned" else 1)
    assert forward.moved + looked_up == pytest.approx(size(ends.forward), rel=SMALL)
    assert backward.moved == pytest.approx(size(ends.backward), rel=SMALL)
