"""Stack: the training software, as far as it changes the cost of a step.

Shoal's own engine is one; others are here because their published runs are what the planner is judged by, and because
a plan can be made for them (``--stack``) and exported to them. What a stack *does* (which kernels, what rests in which
precision) is known from its source; which layouts it runs is in ``facts/layout/stack_limits.py``. Three properties are
fitted, on at most a fifth of its published rows: ``host``, ``fusion`` and ``overlap``. Of stacks that no row was fitted
on these, and ``tensor_overlap``, are judgement, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Stack:
    """One software stack. Strings and booleans are facts about its code; the three numbers at the end are fitted."""

    name: str
    # What a step rests on: weights once, in ``recipe.states``, cast to the compute precision where they are used;
    # half-precision weights beside an fp32 master copy; or working copies in the compute precision beside master copies
    # in ``recipe.states``, as wide as which gradients add up, but for shards, which are gathered as narrow as they are
    # used.
    weights: Literal["cast", "master", "working"] = "cast"
    gradient_bytes: int | None = (
        None  # beside an fp32 master copy; None: gradients are as wide as the weights
    )
    sums_gradients: bool = False  # beside a master copy, gradients add up as wide as ranks sum them
    attention: Literal["flash", "unfused"] = "flash"
    norms: Literal["eager", "fused"] = "eager"
    activation: Literal["eager", "fused"] = "eager"
    # Of experts, what is made of gate and up is made again; where a token's experts are here, its weights are part of
    # that, so that what experts make need not be kept either.
    gates_again: bool = False
    # Queries, keys and values from one product: what is kept of the values then holds all of its result.
    joined: bool = False
    # All logits at once; in chunks, with gradients made in the forward pass; all at once, but compiled into one kernel
    # each way, which reads and writes them in the compute precision.
    loss: Literal["full", "fused", "compiled"] = "fused"
    logit_bytes: float = (
        36.0  # that move for every logit, from the product to the loss and back to its gradient
    )
    loss_tokens: int | None = None  # in a chunk; None: as ``facts.logits`` decides
    adds_products: bool = False  # of chunks to the head's gradient as they are computed, not afterwards
    narrow_gradients: bool = False  # that nothing is added to stay as they were computed
    issues_ahead: bool = False  # a step before the numbers of the one before are read
    one_loss_kernel: bool = (
        False  # for what a loss makes of logits, where there can be one (``facts/logits.py``)
    )
    keeps_logits: bool = False  # whether the caller holds on to them through the backward pass
    # What ``recompute=selective`` keeps: all matrix products; every second one and attention's result; all but
    # attention's inner scores; or all but what norms make.
    selective: Literal["products", "half", "scores", "norms"] = "products"
    # With sequence parallelism: gathered inputs are kept for the backward pass, or gathered again.
    regathers: bool = False
    # With sequence parallelism: collectives work on whole rows of memory, but the sequence is the second dimension of a
    # batch, so what is gathered or scattered is laid out anew.
    copies_sequence: bool = False
    # ``zero`` 1 and 2 with whole parameters and flat buckets; or as FSDP that only skips resharding after the forward.
    unsharded: Literal["buckets", "fsdp"] = "buckets"

    kernel: Literal["flash", "first_flash", "fused"] = (
        "flash"  # of attention that is fused; "fused" is the vendor's
    )
    # Of ring attention: its kernel, where ``kernel`` is the vendor's, and how parts of its result are merged.
    ring: Literal["flash", "fused"] = "flash"
    merges: Literal["eager", "fused"] = "eager"
    dropout: bool = False  # whether masks are drawn and kept
    # Without sequence parallelism: tensor ranks send a part each of what a stage passes on, and gather it over there.
    parts_messages: bool = False
    # Whether a rank waits for every message of an interleaved pipeline; otherwise those of a full one travel beside its
    # computation.
    waits_for_messages: bool = False
    # Whether pipeline stages have equally many layers, whatever embedding and head cost.
    even_stages: bool = False

    bucket_mb: float = 25.0  # of gradients that are summed at once
    gathers_ahead: bool = (
        False  # updated weights, of ``zero`` 1 and 2, while the next step's forward pass goes on
    )

    sends_once: bool = False  # a token to a node, however many of its experts are there, and on from there

    passes_on: bool = False  # what has come to a node, while the rest is still on its way

    # Seconds the host takes to start one layer's forward pass, hidden where the device takes longer.
    host: float = 0.0
    # Ranks reach a collective in the middle of a layer at different times: seconds, for each neighbour within a node.
    arrival: float = 1e-5
    fusion: float = 1.0  # of the bytes that eager elementwise kernels move, the share that is left
    overlap: float = 0.0  # of the data ranks' communication, the share that can hide behind computation
    # Of what tensor ranks exchange with sequence parallelism, the share that travels beside the products that make or
    # read it.
    tensor_overlap: float = 0.0
    # Of what experts' ranks exchange, the share that can hide behind the computation of other micro-batches.
    expert_overlap: float = 0.0


# Ours: on CUDA, attention is what SDPA chooses, which is cuDNN's on Hopper. Its overlap was never measured.
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
# Megatron-LM as it was in the years of its published papers and of vTrain's measurements.
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
    bucket_mb=1e6,  # one buffer of all gradients
    host=0.756e-3,
    arrival=3.65e-5,
    fusion=1.02,
    overlap=0.0,
)
# Megatron Core with Transformer Engine, as its own recipes switch it on: cuDNN attention, fused norms, SwiGLU and
# rotary positions, gradients summed and weights gathered beside the computation, tensor ranks' exchange beside the
# products (``--tp-comm-overlap``). Its host is taken to be as quick as that of others; the other three numbers were set
# by hand on what was published of it (``tests/plan/test_other_stacks.py``): too few rows to leave most of them out.
MEGATRON_CORE = Stack(
    "megatron",
    weights="master",
    sums_gradients=True,
    norms="fused",
    activation="fused",
    joined=True,
    loss="full",  # Transformer Engine's is switched off there, for it was not stable
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
# As it could be set to until late in 2024: norms in a kernel of their own, all else eager.
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
# What its report says of DeepSeek's own: kernels for everything, fp8 products, and a schedule of two directions that
# computes one micro-batch while another's tokens travel. No number of it was fitted.
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
# As 0.3.0's own configs have it: the loss comes chunk by chunk, with its gradients.
TITAN_CHUNKED = replace(TITAN_COMPILED, name="torchtitan", loss="fused", keeps_logits=False)
# DeepSpeed 0.19 around a model of ``transformers``: eager norms and activations, SDPA's attention, all logits in fp32;
# narrow weights and gradients beside an fp32 master copy. Judgement: its hooks take the host as long as a layer's own
# kernels, and its prefetching hides most of what is gathered.
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
# A model of ``transformers`` in FSDP2's shards, as Accelerate and SageMaker's library run it.
TRANSFORMERS = replace(TITAN, name="transformers", selective="products", host=0.4e-3, fusion=2.2, overlap=0.7)

# What ``--stack`` takes.
STACKS = {one.name: one for one in (SHOAL, MEGATRON_CORE, TITAN_CHUNKED, DEEPSPEED)}
