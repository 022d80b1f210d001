"""Model: the shape of a network. The network itself is in ``models/``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
)

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
]

# Upper limits on what a shape makes us count, allocate and search: far beyond any model, and small enough to handle.
MOST_LAYERS = 1024
MOST_EXPERTS = 1 << 12
MOST_EXPERTS_IN_ALL = 1 << 16  # over all layers
WIDEST_HIDDEN = 1 << 16
WIDEST = 1 << 20  # any other width: ffn, heads, ranks
MOST_TOKENS = 1 << 24  # of a vocabulary
MOST_POSITIONS = 1_000_000_000

Width = Annotated[int, Field(ge=1, le=WIDEST)]
Positions = Annotated[int, Field(ge=1, le=MOST_POSITIONS)]


class Shape(BaseModel):
    """Base of everything that describes a network: frozen, hashable, and rejecting unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeScaling(Shape):
    """How rotary frequencies are scaled beyond the length the model was first trained on."""

    kind: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: FiniteFloat
    original_positions: Positions
    # llama3: frequencies between these two wavelengths are blended
    low_frequency_factor: FiniteFloat = 1.0
    high_frequency_factor: FiniteFloat = 4.0
    # yarn
    beta_fast: FiniteFloat = 32.0
    beta_slow: FiniteFloat = 1.0
    attention_factor: FiniteFloat | None = None  # None: derived from factor (and mscale, if given)
    mscale: FiniteFloat | None = None
    mscale_all_dim: FiniteFloat | None = None
    truncate: bool = True


class Experts(Shape):
    """A mixture of experts in place of the MLP of some layers."""

    count: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]  # routed experts
    active: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]  # routed experts that each token uses
    ffn: Width  # width of one routed expert
    shared: Annotated[int, Field(ge=0, le=MOST_EXPERTS)] = 0  # shared experts, which every token uses
    shared_ffn: Annotated[int, Field(ge=0, le=WIDEST)] = 0  # total width of the shared experts
    dense_layers: tuple[int, ...] = ()  # layers that keep an ordinary MLP
    router_bias: bool = False  # deepseek_v3: a per-expert correction without gradient
    groups: Width = 1  # deepseek_v3: experts are chosen within the best groups
    active_groups: Width = 1
    score: Literal["softmax", "sigmoid"] = "softmax"  # how the router turns logits into weights
    normalized: bool = True  # the weights of a token's experts are scaled to sum to one
    scale: FiniteFloat = 1.0  # multiplies those weights afterwards


class Latent(Shape):
    """Multi-head latent attention (deepseek_v3): keys and values pass through a low-rank bottleneck.

    Every head has its own key and value here: the model's ``kv_heads`` is its ``heads``, and its ``head_dim``
    is that of queries and keys, ``nope_dim + rope_dim``.
    """

    q_rank: Width | None  # None: queries are projected directly
    kv_rank: Width
    nope_dim: Width  # per-head width without positions
    rope_dim: Width  # per-head width that rotates, shared by all heads on the key side
    value_dim: Width


# DoRA: only the direction of each row of W + alpha/rank · B·A counts, and its length is trained.
AdapterKind = Literal["lora", "dora"]
# How frozen projections of blocks are stored: in the compute precision, or in 4 bits (facts/nf4.py).
FrozenBase = Literal["bf16", "nf4"]


class Adapters(Shape):
    """LoRA: a product of two narrow matrices, B·A, times alpha / rank, beside each target projection.

    Only adapters are trained; the weights beside them are frozen.
    """

    rank: Annotated[int, Field(ge=1, le=WIDEST)]
    alpha: FiniteFloat
    targets: tuple[str, ...]  # last names of the target projections
    kind: AdapterKind = "lora"
    base: FrozenBase = "bf16"
    dropout: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0  # on the input of A

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Model(Shape):
    """One decoder-only transformer, whichever family it comes from."""

    name: str
    family: Family
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden: Annotated[int, Field(ge=1, le=WIDEST_HIDDEN)]
    heads: Width
    kv_heads: Width
    head_dim: Width
    ffn: Width  # width of the ordinary MLP
    vocab: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    max_positions: Positions

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: FiniteFloat = 1e-5
    norm_offset: bool = False  # RMS norms multiply by 1 + weight and round once, afterwards (Gemma)
    output_norms: bool = False  # outputs of attention and MLP are normed before being added (Gemma)
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True  # gate · up, then down (SwiGLU); False: up, activation, down
    parallel_residual: bool = False  # attention and MLP both read the block's input (NeoX)

    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: FiniteFloat = 10_000.0
    rope_fraction: FiniteFloat = 1.0  # share of each head that rotates (NeoX: 0.25)
    rope_scaling: RopeScaling | None = None
    # The rotary base in layers with a window, which is never scaled (Gemma 3). None: as in all others.
    window_theta: FiniteFloat | None = None

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm on every query and key head (Qwen3)
    window: Positions | None = (
        None  # sliding-window attention: a token sees this many positions, itself included
    )
    window_layers: tuple[int, ...] | None = None  # None: every layer, where a window is set
    query_width: FiniteFloat | None = None  # scores are divided by its square root; None: head_dim
    attention_cap: FiniteFloat | None = None  # scores become cap · tanh(score / cap) (Gemma 2)
    logit_cap: FiniteFloat | None = None  # the same for the head's logits
    scaled_embedding: bool = False  # token embeddings are multiplied by √hidden (Gemma)
    tied: bool = False  # the head is the embedding
    init_std: FiniteFloat = 0.02

    experts: Experts | None = None
    latent: Latent | None = None
    adapters: Adapters | None = None  # None: all weights are trained

    @property
    def base(self) -> Model:
        """The model without adapters."""
        return self if self.adapters is None else self.model_copy(update={"adapters": None})

    @model_serializer(mode="wrap")
    def _as_before_adapters(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialise a model without adapters as earlier versions did, so that both can read it."""
        written: dict[str, Any] = write(self)
        return {name: value for name, value in written.items() if name != "adapters" or value is not None}

    @property
    def score_scale(self) -> float:
        """The factor that products of queries and keys are multiplied by."""
        return float((self.query_width or self.head_dim) ** -0.5)

    def layer_window(self, layer: int) -> int | None:
        """The attention window of one layer, or None if it sees everything."""
        if self.window is None or (self.window_layers is not None and layer not in self.window_layers):
            return None
        return self.window

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers
