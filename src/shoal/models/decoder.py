"""The decoder: one network for Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3, Phi-3, GPT-2, NeoX, Mixtral, Qwen3-MoE and
DeepSeek-V3, configured by its ``Model``.

Parameters have Llama's Hugging Face names whatever the family, and this file knows nothing about parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.facts.model import Model
from shoal.models.attention import Attention
from shoal.models.documents import Documents
from shoal.models.dropout import Dropout
from shoal.models.experts import MixtureOfExperts
from shoal.models.latent_attention import LatentAttention
from shoal.models.linear import Embedding
from shoal.models.loss import Head
from shoal.models.losses import Loss, NextToken
from shoal.models.mlp import MLP
from shoal.models.norm import block_norm
from shoal.models.random import bits
from shoal.models.rotary import Rotation, tables
from shoal.models.router import RouterLosses


class Block(nn.Module):
    """Attention and an MLP, or a mixture of experts, each with a norm before it, each added to the residual stream.

    In some families their outputs are also normed before they are added.

    Layers differ only in their weights (and in some families the window, or having experts), so the compiler needs one
    graph for all of them: the noise passed in is already specific to the layer.
    """

    def __init__(self, model: Model, layer: int, dropout: float, router: RouterLosses) -> None:
        super().__init__()
        self.input_layernorm = block_norm(model)
        self.self_attn = Attention(model, layer) if model.latent is None else LatentAttention(model)
        self.attention_output_norm, self.mlp_output_norm = (
            block_norm(model) if model.output_norms else None for _ in range(2)
        )
        self.post_attention_layernorm = block_norm(model)
        self.mlp = MixtureOfExperts(model, router) if model.has_experts(layer) else MLP(model, model.ffn)
        self.attention_dropout = Dropout("self_attn", dropout)
        self.mlp_dropout = Dropout("mlp", dropout)
        self.parallel_residual = model.parallel_residual

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        positions: Tensor,
        documents: Documents | None,
        noise: Tensor | None,
    ) -> Tensor:
        after, read = self.attended(hidden, rotation, positions, documents, noise)
        return self.added(after, self.mlp(read, positions, noise), positions, noise)

    def attended(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        positions: Tensor,
        documents: Documents | None,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The stream after attention, and the input of the MLP."""
        attended: Tensor = self.self_attn(self.input_layernorm(hidden), rotation, positions, documents, noise)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        after: Tensor = hidden + self.attention_dropout(attended, positions, noise)
        # With parallel residuals (NeoX) the MLP reads the block's input; otherwise, the stream after attention.
        return after, self.post_attention_layernorm(hidden if self.parallel_residual else after)

    def added(self, after: Tensor, fed: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        """The stream after the MLP."""
        if self.mlp_output_norm is not None:
            fed = self.mlp_output_norm(fed)
        output: Tensor = after + self.mlp_dropout(fed, positions, noise)
        return output


class Decoder(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(
        self, model: Model, dropout: float, compute: torch.dtype, length: int | None, router: RouterLosses
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(model.vocab, model.hidden, compute)
        self.embed_positions = (
            Embedding(model.max_positions, model.hidden, compute) if model.positions == "learned" else None
        )
        self.embedding_dropout = Dropout("embed_tokens", dropout)
        # Keyed by name instead of a list: a pipeline stage keeps some of the blocks under their names.
        self.layers = nn.ModuleDict(
            {str(layer): Block(model, layer, dropout, router) for layer in range(model.layers)}
        )
        self.norm = block_norm(model)
        self.shape = model
        self.compute = compute
        self.length = length
        # Rounded to the weights' precision, as in Hugging Face.
        scale = torch.tensor(model.hidden**0.5 if model.scaled_embedding else 1.0, device="cpu")
        self.embedding_scale = scale.to(compute).item()

    def embed(self, tokens: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        """Tokens [B, T] → hidden states [B, T, hidden] in the compute dtype."""
        hidden: Tensor = self.embed_tokens(tokens)
        if self.shape.scaled_embedding:
            hidden = hidden * self.embedding_scale
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        output: Tensor = self.embedding_dropout(hidden, positions, noise)
        return output

    def rotations(self, positions: Tensor) -> tuple[Rotation | None, Rotation | None]:
        """Cosine and sine tables for layers without a window, and for those with one."""
        if self.shape.positions != "rotary":
            return None, None
        usual = tables(self.shape, self.length, positions, self.compute)
        if self.shape.window_theta is None:
            return usual, usual
        return usual, tables(self.shape, self.length, positions, self.compute, windowed=True)

    def forward(
        self, inputs: Tensor, positions: Tensor, documents: Documents | None, noise: Tensor | None
    ) -> Tensor:
        """Run every layer held here; a pipeline stage without the embedding takes hidden states."""
        hidden = inputs if self.embed_tokens is None else self.embed(inputs, positions, noise)
        rotation, in_window = self.rotations(positions)
        for layer, block in self.layers.items():
            own = None if noise is None else bits(noise, torch.full_like(noise, int(layer)))
            turned = rotation if self.shape.layer_window(int(layer)) is None else in_window
            hidden = block(hidden, turned, positions, documents, own)
        return hidden if self.norm is None else self.norm(hidden)


class Network(nn.Module):
    """A decoder, its head and its loss. The forward pass ends at the hidden states, where the loss begins."""

    def __init__(
        self,
        model: Model,
        dropout: float,
        compute: torch.dtype,
        length: int | None,
        z_loss: float,
        router: RouterLosses,
        loss: Loss,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.model = Decoder(model, dropout, compute, length, router)
        tied = self.model.embed_tokens if model.tied else None
        self.lm_head = Head(model.hidden, model.vocab, tied, z_loss, model.logit_cap)
        self.shape = model

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Documents | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, hidden] after the final norm; of a pipeline stage, after what it has.

        tokens, positions: int64 [B, T]; a stage without the embedding takes hidden states instead of tokens.
        documents: None if every row is one document. Positions ascend within a document. noise: int64 [B], one hashed
        key per sequence, None for no dropout.
        """
        hidden: Tensor = self.model(tokens, positions, documents, noise)
        return hidden


NO_LOSSES = RouterLosses()


def build(
    model: Model,
    dropout: float = 0.0,
    compute: torch.dtype = torch.float32,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
    length: int | None = None,
    z_loss: float = 0.0,
    router: RouterLosses = NO_LOSSES,
    loss: Loss | None = None,
) -> Network:
    """The network of a model, with uninitialised parameters: see ``initial.initialise``.

    compute: the dtype of activations. dtype: that of the parameters. length: the row length, needed if it exceeds
    max_positions and the model has dynamic rotary scaling (see ``rotary.frequencies``). loss: next-token by default.
    """
    with torch.device("meta"):
        network = Network(model, dropout, compute, length, z_loss, router, loss or NextToken()).to(dtype)
    return network if torch.device(device).type == "meta" else network.to_empty(device=device)
