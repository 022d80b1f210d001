"""Stack: the training software, as far as it changes the cost of a step.

Shoal's own engine is one; others are here because their published runs validate the planner, and because plans can be
made for them (``--stack``) and exported to them. What a stack *does* (its kernels, its stored precisions) is known
from its source; ``facts/layout/stack_limits.py`` has the layouts it runs. Three properties are fitted, on at most a
fifth of its published rows: ``host``, ``fusion`` and ``overlap``. For stacks without fitted rows these, and
``tensor_overlap``, are estimates and marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Stack:
    """One software stack. Strings and booleans are facts about its code; the three numbers at the end are fitted."""

    name: str
    # How weights are stored: once, in ``recipe.states``, and cast to the compute precision on use; as half-precision
    # weights with an fp32 master copy; or as working copies in the compute precision with master copies in
    # ``recipe.states``, in whose precision gradients accumulate, except for shards, which are all-gathered in the
    # compute precision.
    weights: Literal["cast", "master", "working"] = "cast"
    gradient_bytes: int | None = None  # with fp32 master weights; None: gradients are as wide as the weights
    sums_gradients: bool = False  # with master weights, gradients accumulate in the reduction precision
    attention: Literal["flash", "unfused"] = "flash"
    norms: Literal["eager", "fused"] = "eager"
    activation: Literal["eager", "fused"] = "eager"
    # Experts recompute what follows gate and up; if a token's experts are on its rank, that includes its routing
    # weights, so the experts' outputs need not be saved either.
    gates_again: bool = False
    # Queries, keys and values come from one product: saving the values then keeps all of its output.
    joined: bool = False
    # All logits at once; in chunks, with gradients computed in the forward pass; or all at once, compiled into one
    # kernel per direction that reads and writes them in the compute precision.
    loss: Literal["full", "fused", "compiled"] = "fused"
    logit_bytes: float = 36.0  # moved per logit, from the product to the loss and back to its gradient
    loss_tokens: int | None = None  # per chunk; None: as ``facts.logits`` decides
    adds_products: bool = False  # chunks' products accumulate directly into the head's gradient
    narrow_gradients: bool = False  # gradients without accumulation stay in the compute precision
    issues_ahead: bool = False  # launches a step before reading the previous step's results
    one_loss_kernel: bool = (
        False  # computes the loss and its gradients in one kernel, where there is one (``facts/logits.py``)
    )
    keeps_logits: bool = False  # whether the caller holds them through the backward pass
    # What ``recompute=selective`` saves: all matrix products; every second one and attention's output; everything but
    # attention's inner scores; or everything but the norms' outputs.
    selective: Literal["products", "half", "scores", "norms"] = "products"
    # With sequence parallelism: gathered inputs are gathered again in the backward pass instead of being saved.
    regathers: bool = False
    # With sequence parallelism: collectives need contiguous rows, but the sequence is the second dimension of a batch,
    # so what is gathered or scattered is copied to another layout.
    copies_sequence: bool = False
    # ``zero`` 1 and 2 with whole parameters and flat buckets; or as FSDP that only skips resharding after the forward.
    unsharded: Literal["buckets", "fsdp"] = "buckets"

    kernel: Literal["flash", "first_flash", "fused"] = "flash"  # of fused attention; "fused" is the vendor's
    # Ring attention: its kernel if ``kernel`` is the vendor's, and how partial results are merged.
    ring: Literal["flash", "fused"] = "flash"
    merges: Literal["eager", "fused"] = "eager"
    dropout: bool = False  # whether masks are drawn and saved
    # Without sequence parallelism: each tensor rank sends a part of a stage's output, which is all-gathered on the
    # other side.
    parts_messages: bool = False
    # Whether a rank waits for every message of an interleaved pipeline; otherwise a full pipeline overlaps them with
    # computation.
    waits_for_messages: bool = False
    # Whether pipeline stages have equally many layers, regardless of embedding and head.
    even_stages: bool = False

    bucket_mb: float = 25.0  # of gradients reduced at once
    gathers_ahead: bool = (
        False  # under ``zero`` 1 and 2, all-gathers updated weights during the next step's forward pass
    )

    sends_once: bool = False  # sends a token once per node, which forwards it to its experts

    passes_on: bool = False  # forwards what has reached a node while the rest is still in transit

    # Seconds for the host to launch one layer's forward pass, hidden if the device takes longer.
    host: float = 0.0
    # Seconds per neighbour within a node by which ranks reach a collective inside a layer at different times.
    arrival: float = 1e-5
    fusion: float = 1.0  # the remaining share of the bytes moved by eager elementwise kernels
    overlap: float = 0.0  # the share of data ranks' communication that can overlap computation
    # With sequence parallelism: the share of tensor ranks' exchange that overlaps the products that produce or read
    # it.
    tensor_overlap: float = 0.0
    # The share of expert ranks' exchange that can overlap other micro-batches' computation.
    expert_overlap: float = 0.0


# Ours: on CUDA, SDPA chooses the attention kernel, which is cuDNN's on Hopper. Its overlap was never measured.
SHOAL = Stack(
    "shoal",
    weights="working",
    logit_bytes=8.0,
    adds_products=True,
    narrow_gradients=True,
    gates_again=True,
    issues_ahead=True,
    one_loss_kernel=True,
    kernel="fused",
    sends_once=True,
    host=0.3e-3,
    fusion=2.2,
    overlap=0.7,
)
# Megatron-LM at the time of its published papers and of vTrain's measurements.
MEGATRON = Stack(
    "megatron 2022",
    weights="master",
    attention="unfused",
    norms="fused",
    activation="fused",
    joined=True,
    loss="full",
    logit_bytes=95.0,
    selective="scores",
    regathers=True,
    dropout=True,
    parts_messages=True,
    waits_for_messages=True,
    even_stages=True,
    bucket_mb=1e6,  # one buffer for all gradients
    host=0.756e-3,
    arrival=3.65e-5,
    fusion=1.02,
    overlap=0.0,
)
# Megatron Core with Transformer Engine, as configured by its own recipes: cuDNN attention, fused norms, SwiGLU and
# rotary positions; gradient reduction, weight gathering and tensor ranks' exchange overlap with computation
# (``--tp-comm-overlap``). Its host is assumed as fast as the others'; the other three numbers were set by hand to
# match its published runs (``tests/plan/test_other_stacks.py``): too few rows to hold most of them out.
MEGATRON_CORE = Stack(
    "megatron",
    weights="master",
    sums_gradients=True,
    norms="fused",
    activation="fused",
    joined=True,
    loss="full",  # Transformer Engine's is disabled there, as it was unstable
    logit_bytes=95.0,
    selective="norms",
    regathers=True,
    kernel="fused",
    ring="fused",
    merges="fused",
    parts_messages=True,
    bucket_mb=160.0,  # 40 million gradients in fp32
    gathers_ahead=True,
    host=0.3e-3,
    fusion=2.0,
    overlap=0.9,
    tensor_overlap=0.35,
)
FOUNDRY = Stack(
    "llm-foundry",
    norms="fused",
    activation="fused",
    joined=True,
    loss="compiled",  # flash-attn's cross-entropy: logits and their gradients in the compute precision
    logit_bytes=10.0,
    unsharded="fsdp",
    kernel="first_flash",
    host=0.302e-3,
    fusion=3.76,
    overlap=0.238,
)
TITAN = Stack(
    "torchtitan eager",
    loss="full",
    keeps_logits=True,
    selective="half",
    copies_sequence=True,
    unsharded="fsdp",
    host=0.296e-3,
    fusion=1.6,
    overlap=0.87,
)
# The option it had until late 2024: norms in a fused kernel, everything else eager.
TITAN_FUSED_NORMS = replace(TITAN, name="torchtitan with fused norms", norms="fused")
# The blocks' elementwise work becomes a few kernels; the loss reads and writes its logits less often.
TITAN_COMPILED = replace(
    TITAN,
    name="torchtitan compiled",
    norms="fused",
    activation="fused",
    logit_bytes=16.0,
    copies_sequence=False,
)
# DeepSeek's own, from its report: custom kernels for everything, fp8 products, and a bidirectional schedule that
# computes one micro-batch while another's tokens travel. None of its numbers were fitted.
DEEPSEEK = Stack(
    "deepseek",
    weights="master",
    norms="fused",
    activation="fused",
    joined=True,
    loss="compiled",
    logit_bytes=16.0,
    kernel="fused",
    ring="fused",
    merges="fused",
    sends_once=True,
    passes_on=True,
    host=0.3e-3,
    fusion=1.0,
    overlap=0.87,
    expert_overlap=0.87,
)
# As in 0.3.0's own configs: a chunked loss with its gradients.
TITAN_CHUNKED = replace(TITAN_COMPILED, name="torchtitan", loss="fused", keeps_logits=False)
# DeepSpeed 0.19 around a ``transformers`` model: eager norms and activations, SDPA's attention, all logits in fp32;
# narrow weights and gradients with fp32 master weights. Estimated: its hooks take the host as long as a layer's own
# kernels, and its prefetching hides most all-gathers.
DEEPSPEED = Stack(
    "deepspeed",
    weights="master",
    loss="full",
    keeps_logits=True,
    kernel="flash",
    host=0.6e-3,
    fusion=2.2,
    overlap=0.7,
)
# A ``transformers`` model under FSDP2, as run by Accelerate and SageMaker's library.
TRANSFORMERS = replace(TITAN, name="transformers", selective="products", host=0.4e-3, fusion=2.2, overlap=0.7)

# The choices of ``--stack``.
STACKS = {one.name: one for one in (SHOAL, MEGATRON_CORE, TITAN_CHUNKED, DEEPSPEED)}
