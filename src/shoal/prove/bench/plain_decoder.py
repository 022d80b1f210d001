"""A Llama-shaped decoder in plain PyTorch, for peers that bring no model of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.model import Model

Rotation = tuple[Tensor, Tensor]


class PlainNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PlainAttention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = nn.Linear(model.hidden, width, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.hidden, kv_width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden, kv_width, bias=model.qkv_bias)
        self.o_proj = nn.Linear(width, model.hidden, bias=False)
        self.q_norm = PlainNorm(model.head_dim, model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm = PlainNorm(model.head_dim, model.norm_eps) if model.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        # The number of heads is read off the tensor: under tensor parallelism a rank has only some of them.
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_dim))
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query = rotate(self.q_norm(query).transpose(1, 2), rotation)
        key = rotate(self.k_norm(key).transpose(1, 2), rotation)
        mixed = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class PlainMLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up_proj = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down_proj = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class PlainBlock(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.input_layernorm = PlainNorm(model.hidden, model.norm_eps)
        self.self_attn = PlainAttention(model)
        self.post_attention_layernorm = PlainNorm(model.hidden, model.norm_eps)
        self.mlp = PlainMLP(model)

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class PlainDecoder(nn.Module):
    """Tokens in, logits out. A pipeline stage sets the parts that it does not have to None."""

    # A plain attribute and not a buffer: DDP would broadcast buffers before every forward pass.
    rotation: Rotation

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding | None = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(PlainBlock(model) for _ in range(model.layers))
        self.norm: PlainNorm | None = PlainNorm(model.hidden, model.norm_eps)
        self.lm_head: nn.Linear | None = nn.Linear(model.hidden, model.vocab, bias=False)

    def tie(self) -> None:
        assert self.embed_tokens is not None and self.lm_head is not None
        self.lm_head.weight = self.embed_tokens.weight

    @staticmethod
    def canonical(name: str) -> str:
        """The name of one of our parameters in Hugging Face's, and so Shoal's, convention."""
        return name if name.startswith("lm_head") else f"model.{name}"

    def hidden(self, inputs: Tensor) -> Tensor:
        """Run everything that is here up to the head; a stage without the embedding takes hidden states."""
        hidden: Tensor = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        for block in self.layers:
            hidden = block(hidden, self.rotation)
        return hidden if self.norm is None else self.norm(hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.hidden(inputs)
        return hidden if self.lm_head is None else self.lm_head(hidden)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every head of x [B, heads, T, head_dim]; a pair is (i, i + half), as in Hugging Face's weights."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)
