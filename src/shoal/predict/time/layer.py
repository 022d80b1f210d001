"""What one rank computes in a layer, and how long it takes.

Elementwise work is counted in passes: a pass reads or writes every element of a tensor once, at the compute width. On
a calibrated device, Shoal's own engine is counted operator by operator instead (``predict/time/measured_layer.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from shoal.facts.cluster.stack import Stack
from shoal.facts.expert_load import busiest
from shoal.facts.model import Experts, Model
from shoal.facts.precision import compute_width, reduce_width, state_width
from shoal.facts.recipe import Recipe
from shoal.predict.flops import attention_flops, attention_kinds
from shoal.predict.time import ring
from shoal.predict.time.compiled_operators import compiled_block
from shoal.predict.time.kernels import Kernels, LayerProduct
from shoal.predict.time.operators import Tokens, Widths


class Passes(NamedTuple):
    forward: float
    backward: float


# Passes over the residual stream per norm. RMS norms without a fused kernel go through fp32 operator by operator.
NORM = {("rms", "eager"): Passes(18, 30), ("rms", "fused"): Passes(2, 3)}
LAYER_NORM = Passes(2, 3)
RESIDUAL = Passes(3, 3)
DROPOUT = Passes(1.5, 0.5)
# Passes over the MLP's inner width.
GATED = {"eager": Passes(5, 9), "fused": Passes(3, 5)}
PLAIN = Passes(2, 3)
# Passes over queries and keys.
ROTARY = {"eager": Passes(10, 10), "fused": Passes(2, 2)}
# Passes over queries: laid out for attention, and back.
COPIES = Passes(2, 2)

# Bytes per score of unfused attention: written, scaled and masked, exponentiated, dropped out with a one-byte mask,
# read again; in the backward pass each with its gradient.
SCORES = Passes(13, 19)
# The same for capped scores, a few queries at a time (models/attention_blocks.py): each operator reads and writes
# fp32. Counted from that code, never measured.
CAPPED = Passes(80, 130)

# Bytes per parameter and micro-batch: wide weights cast for the products, gradients cast back; and added to those of
# earlier micro-batches.
CAST = Passes(6, 6)
ADD = {"cast": 8, "master": 6, "working": 8}


NONE = Passes(0, 0)

# How weights are stored, which decides how gradients accumulate: whole; gathered for each pass, so that shards
# accumulate; or, in a pipeline, gathered for the step, with gradients reduced at its end: until then they accumulate
# whole, in the reduction precision.
WeightStorage = Literal["whole", "gathered", "kept"]
RESTS: tuple[WeightStorage, ...] = ("whole", "gathered", "kept")


class WeightTraffic(NamedTuple):
    """Bytes moved per parameter and micro-batch besides its products: for experts, and for everything else."""

    dense: Passes
    experts: Passes


FREE = WeightTraffic(NONE, NONE)

# Slowdown of a compiled block's kernels: on an H200 they take 1.1 to 1.2 times their bytes at memory bandwidth.
COMPILED_FUSION = 1.15


def handling(stack: Stack, recipe: Recipe, rests: WeightStorage, micro_batches: int) -> Passes:
    """Bytes moved per parameter and micro-batch: casts, and accumulation over micro-batches.

    Parameters that are gathered for use are cast, and their gradients accumulated, as shards.
    """
    if rests == "gathered":
        return NONE
    if rests == "kept" and stack.weights != "master":
        return kept(recipe, micro_batches)
    wide = stack.weights != "master" and state_width(recipe) > compute_width(recipe)
    forward, backward = CAST if wide else NONE
    if stack.weights == "working":
        forward = 0  # the update has cast it
    return Passes(forward, backward + (ADD[stack.weights] if micro_batches > 1 else 0))


def kept(recipe: Recipe, micro_batches: int, widening: float = 1.0) -> Passes:
    """The first micro-batch's gradients are widened to the reduction precision, the others' are added to them."""
    compute, summed = compute_width(recipe), reduce_width(recipe)
    first = widening * (compute + summed) if compute < summed else 0.0
    return Passes(0.0, (first + (2 * summed + compute) * (micro_batches - 1)) / micro_batches)


class Seconds(NamedTuple):
    """Device seconds of one layer (or of the ends) for one micro-batch."""

    forward: float
    input: float  # input gradients
    weight: float  # weight gradients
    again: float  # work repeated by selective recomputation
    full: float  # work repeated by full recomputation

    @property
    def backward(self) -> float:
        return self.input + self.weight


class LayerShare(NamedTuple):
    """One rank's share of a layer."""

    tokens: int  # of a micro-batch, as its products see them
    between: float  # tokens between attention and MLP: fewer with sequence parallelism
    sequences: int
    seq: int
    tp: int
    ep: int
    experts: bool
    held: WeightTraffic = FREE  # see ``handling``
    compiled: bool = False
    dropout: bool = False
    turns: int = 1  # steps of ring attention
    unpacks: bool = False  # frozen weights are in 4 bits and unpacked on every use
    adapted: tuple[str, ...] = ()  # projections with adapters, by the last part of their name
    expert_parts: int = 1  # parts in which experts compute its tokens

    @property
    def of_products(self) -> tuple[object, ...]:
        """Cache key: everything its products depend on."""
        return "products", self.tokens, self.tp, self.ep, self.experts, self.expert_parts

    @property
    def of_elements(self) -> tuple[object, ...]:
        """Cache key: everything its elementwise work depends on."""
        return "elements", self.tokens, self.between, self.tp, self.experts, self.compiled, self.dropout

    def of_attention(self, counts_sequences: bool) -> tuple[object, ...]:
        """Cache key: everything its attention depends on."""
        return "attention", self.tokens, self.tp, self.turns, counts_sequences and self.sequences


def products(model: Model, share: LayerShare, joined: bool = False) -> list[LayerProduct]:
    """The products of a layer's forward pass. ``joined``: queries, keys and values come from one product."""
    tokens, hidden, tp = share.tokens, model.hidden, share.tp
    heads = model.heads // tp
    found: list[LayerProduct] = []
    if (latent := model.latent) is not None:
        query = heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank is None:
            found.append(LayerProduct(tokens, hidden, query, 1))
        else:
            found += [
                LayerProduct(tokens, hidden, latent.q_rank, 1),
                LayerProduct(tokens, latent.q_rank, query, 1),
            ]
        found.append(LayerProduct(tokens, hidden, latent.kv_rank + latent.rope_dim, 1))
        found.append(LayerProduct(tokens, latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), 1))
        found.append(LayerProduct(tokens, heads * latent.value_dim, hidden, 1))
    else:
        query, key = heads * model.head_dim, max(1, model.kv_heads // tp) * model.head_dim
        if joined:
            found.append(LayerProduct(tokens, hidden, query + 2 * key, 1))
        else:
            found += [LayerProduct(tokens, hidden, query, 1), LayerProduct(tokens, hidden, key, 2)]
        found.append(LayerProduct(tokens, query, hidden, 1))
    experts = model.experts
    if not share.experts or experts is None:
        return found + _mlp(model, tokens, model.ffn // tp, 1)
    found.append(LayerProduct(tokens, hidden, experts.count, 1))
    if experts.shared:
        found += _mlp(model, tokens, experts.shared_ffn // tp, 1)
    return found + routed_products(model, experts, share)


def routed_products(model: Model, experts: Experts, share: LayerShare) -> list[LayerProduct]:
    """The busiest rank's tokens, spread evenly over its experts."""
    here, parts = experts.count // share.ep, share.expert_parts
    rows = max(1, int(share.tokens * experts.active * busiest(share.ep)) // (here * parts))
    found = _mlp(model, rows, max(1, experts.ffn // share.tp), here)
    return [one._replace(routed=True, parts=parts) for one in found]


def added_by_part(share: LayerShare, width: int) -> float:
    """Bytes moved per expert parameter to add gradients of one part of the tokens to another's."""
    return 0.0 if share.adapted else 3.0 * width * (share.expert_parts - 1)


def moved_beside(found: Iterable[LayerProduct], held: WeightTraffic) -> Passes:
    """Bytes moved besides the products, per micro-batch."""
    dense = experts = 0
    for one in found:
        if one.routed:
            experts += one.parameters
        else:
            dense += one.parameters
    return Passes(*(dense * own + experts * routed for own, routed in zip(*held, strict=True)))


def shared_experts(model: Model, kernels: Kernels, share: LayerShare) -> tuple[float, float]:
    """Seconds of the shared experts' products, forward and backward."""
    found = []
    if model.experts is not None and model.experts.shared:
        found = _mlp(model, share.tokens, model.experts.shared_ffn // share.tp, 1)
    return _both_passes(kernels, share, found)


def routed_experts(model: Model, kernels: Kernels, share: LayerShare) -> tuple[float, float]:
    """Seconds of the routed experts' products, forward and backward."""
    found = [] if model.experts is None else routed_products(model, model.experts, share)
    return _both_passes(kernels, share, found)


def _both_passes(kernels: Kernels, share: LayerShare, found: Iterable[LayerProduct]) -> tuple[float, float]:
    forward = backward = 0.0
    for one in found:
        ahead, inputs, weights = kernels.ways(one, share.compiled)
        forward, backward = forward + ahead, backward + inputs + weights
    return forward, backward


def _mlp(model: Model, rows: int, width: int, groups: int) -> list[LayerProduct]:
    into = 2 if model.gated else 1
    return [
        LayerProduct(rows, model.hidden, width, into, groups),
        LayerProduct(rows, width, model.hidden, 1, groups),
    ]


class Multiplied(NamedTuple):
    """Seconds of a layer's products, and its parameters: without experts, and of experts."""

    forward: float
    input: float
    weight: float
    dense: int
    experts: int


class Elementwise(NamedTuple):
    """Seconds of a layer's elementwise work; ``norms``: its norms' forward part."""

    forward: float
    backward: float
    norms: float


def multiplied(model: Model, stack: Stack, kernels: Kernels, share: LayerShare) -> Multiplied:
    found = products(model, share, stack.joined)
    forward, inputs, weights = (sum(way) for way in zip(*map(kernels.ways, found), strict=True))
    routed = sum(one.parameters for one in found if one.routed)
    return Multiplied(forward, inputs, weights, sum(one.parameters for one in found) - routed, routed)


def elementwise(model: Model, stack: Stack, kernels: Kernels, share: LayerShare) -> Elementwise:
    moved = _compiled(model, kernels, share) if share.compiled else _moved(model, stack, share)
    scale = kernels.width * (COMPILED_FUSION if share.compiled else stack.fusion)
    norms = share.between * model.hidden * 2 * _norm(model, stack).forward
    return Elementwise(*(kernels.moved(size * scale) for size in (*moved, norms)))


def layer(
    stack: Stack,
    kernels: Kernels,
    share: LayerShare,
    multiplied: Multiplied,
    elementwise: Elementwise,
    attended: tuple[float, float],
) -> Seconds:
    """One layer and one micro-batch, composed from its parts."""
    forward, inputs, weights, dense, routed = multiplied
    attend, attend_back = attended
    pointwise = elementwise.forward
    own, experts = share.held
    by_part = added_by_part(share, kernels.width)
    again = attend
    if not share.compiled:  # which makes elementwise results anew where it reads them
        again = {
            "products": pointwise + attend,
            "half": pointwise + forward / 2,
            "scores": attend,
            "norms": elementwise.norms,
        }[stack.selective]
    whole = forward + attend + pointwise + kernels.moved(dense * own.forward + routed * experts.forward)
    return Seconds(
        whole,
        inputs + attend_back + elementwise.backward,
        weights + kernels.moved(dense * own.backward + routed * (experts.backward + by_part)),
        again,
        whole,
    )


def attention(model: Model, stack: Stack, kernels: Kernels, share: LayerShare) -> tuple[float, float]:
    """Seconds of attention forward and backward, averaged over the model's layers."""
    if stack.attention == "unfused":
        # The whole square is computed, and its scores go through memory.
        scores = share.sequences * (model.heads // share.tp) * share.seq**2
        flops = 4.0 * scores * model.head_dim
        move = [kernels.moved(scores * size * stack.fusion) for size in SCORES]
        return kernels.batched(flops) + move[0], 2 * kernels.batched(flops) + move[1]
    total = [0.0, 0.0]
    for layer, windowed, part in attention_kinds(model, share.seq):
        # Only visible pairs count; the vendor's kernel does not support windows (models/varlen.py).
        by_turns = share.turns > 1 and stack.ring == "flash"
        kernel = "flash" if (windowed or by_turns) and stack.kernel == "fused" else stack.kernel
        flops = share.tokens * attention_flops(model, layer, share.seq) / share.tp
        longer = ring.shorter(share.seq, share.turns)
        forward, backward = kernels.attention(kernel, flops, model.head_dim)
        found = longer * forward, longer * backward
        if model.attention_cap is not None:
            found = capped_attention(model, kernels, flops, windowed)
        for way, seconds in enumerate(found):
            total[way] += part * seconds
    more = merging(model, stack, kernels, share)
    return total[0] + more[0], total[1] + more[1]


def merging(model: Model, stack: Stack, kernels: Kernels, share: LayerShare) -> tuple[float, float]:
    """Seconds of merging the steps of a ring, forward and backward."""
    if share.turns == 1:
        return 0.0, 0.0
    query, key = head_widths(model, share.tp)
    forward, backward = ring.merged(stack, share.turns, share.tokens * query, 2.0 * share.tokens * key)
    return kernels.moved(forward), kernels.moved(backward)


def capped_attention(model: Model, kernels: Kernels, flops: float, windowed: bool) -> tuple[float, float]:
    """Attention with capped scores, forward and backward: plain products, on blocks twice as long as a window."""
    computed = flops * (2 if windowed else 1)
    scores = computed / (4 * model.head_dim)
    return (
        kernels.batched(computed) + kernels.moved(scores * CAPPED.forward),
        2.5 * kernels.batched(computed) + kernels.moved(scores * CAPPED.backward),
    )


def _moved(model: Model, stack: Stack, share: LayerShare) -> Passes:
    """Elements that elementwise kernels read and write."""
    norm = _norm(model, stack)
    rotary = ROTARY[stack.activation] if model.positions == "rotary" else NONE
    inner = GATED[stack.activation] if model.gated else PLAIN
    tokens, width = share.tokens, inner_width(model, share)
    query, key = head_widths(model, share.tp)
    found = []
    for way in (0, 1):
        stream = (
            (4 if model.output_norms else 2) * norm[way]
            + 2 * RESIDUAL[way]
            + (2 * DROPOUT[way] if stack.dropout else 0)
        )
        rotated = rotary[way] + (norm[way] if model.qk_norm else 0)
        found.append(
            share.between * model.hidden * stream
            + tokens * (query * COPIES[way] + (query + key) * rotated + width * inner[way])
        )
    return Passes(*found)


def _norm(model: Model, stack: Stack) -> Passes:
    return LAYER_NORM if model.norm == "layer" else NORM["rms", stack.norms]


def _compiled(model: Model, kernels: Kernels, share: LayerShare) -> Passes:
    """Elements that a compiled block's kernels read and write."""
    found = compiled_block(model, tokens_of(model, share), Widths(kernels.width, kernels.width))
    return Passes(
        *(sum(work.bytes for work in way) / kernels.width for way in (found.forward, found.backward))
    )


def tokens_of(model: Model, share: LayerShare) -> Tokens:
    return Tokens(share.tokens, share.between, *head_widths(model, share.tp), inner_width(model, share))


def head_widths(model: Model, tp: int) -> tuple[int, int]:
    """A rank's widths of queries and of keys."""
    return model.heads // tp * model.head_dim, max(1, model.kv_heads // tp) * model.head_dim


def inner_width(model: Model, share: LayerShare) -> float:
    """A rank's inner width of the MLP."""
    experts = model.experts if share.experts else None
    if experts is None:
        return model.ffn / share.tp
    # Tokens are also copied to each active expert and back.
    return (experts.active * (experts.ffn + 2 * model.hidden) + experts.shared_ffn) / share.tp


def head(model: Model, stack: Stack, kernels: Kernels, tokens: int, rows: int, held: Passes) -> Seconds:
    """The head's product with ``rows`` of the vocabulary on this rank, and the loss."""
    product = kernels.product(tokens, model.hidden, rows)
    move = kernels.moved(tokens * rows * stack.logit_bytes)
    cast, added = (kernels.moved(rows * model.hidden * each) for each in held)
    inputs = kernels.product(tokens, rows, model.hidden)
    weights = kernels.product(model.hidden, tokens, rows)
    if stack.loss == "fused":  # computes all gradients along with the loss
        return Seconds(product + inputs + weights + move + cast, 0.0, added, 0.0, 0.0)
    return Seconds(product + move / 2 + cast, inputs + move / 2, weights + added, 0.0, 0.0)


def embedding(model: Model, kernels: Kernels, tokens: int) -> Seconds:
    """A lookup, and the accumulation of its gradients."""
    move = kernels.moved(tokens * model.hidden * kernels.width * 4)
    return Seconds(move, 0.0, move, 0.0, 0.0)
