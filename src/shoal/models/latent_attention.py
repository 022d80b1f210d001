"""Multi-head latent attention (DeepSeek-V3): queries, keys and values come from low-rank vectors.

Keys and values of all heads are projected from one low-rank vector per token, and queries, optionally, from another.
Positions bypass it: every head has a separate rotated part, on the key's side shared by all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.model import Model
from shoal.models.attention import Attend, attend
from shoal.models.documents import Documents
from shoal.models.linear import Linear
from shoal.models.norm import RMSNorm
from shoal.models.rotary import rotate, sharpness

# Epsilon of the norms on low-rank vectors, independent of the other norms.
NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Like ``Attention``; the number of heads follows from the tensors, so that ranks may split them."""

    attend: Attend

    def __init__(self, model: Model) -> None:
        super().__init__()
        latent, hidden, bias = model.latent, model.hidden, model.qkv_bias
        assert latent is not None
        queries = model.heads * (latent.nope_dim + latent.rope_dim)
        self.q_proj = self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        if latent.q_rank is None:
            self.q_proj = Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = Linear(hidden, latent.q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, NORM_EPS)
            self.q_b_proj = Linear(latent.q_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, latent.kv_rank + latent.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, NORM_EPS)
        self.kv_b_proj = Linear(
            latent.kv_rank, model.heads * (latent.nope_dim + latent.value_dim), bias=False
        )
        self.o_proj = Linear(model.heads * latent.value_dim, hidden, bias=model.out_bias)
        self.latent = latent
        self.scale = model.head_dim**-0.5
        if model.rope_scaling is not None and model.rope_scaling.mscale_all_dim:
            self.scale *= sharpness(model.rope_scaling.factor, model.rope_scaling.mscale_all_dim) ** 2
        self.attend = attend

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        documents: Documents | None,
        noise: Tensor | None = None,
    ) -> Tensor:
        assert rotation is not None
        latent = self.latent
        query, turning = self._heads(self._queries(x, positions, noise)).split(
            [latent.nope_dim, latent.rope_dim], dim=-1
        )
        narrow, shared = self.kv_a_proj_with_mqa(x, positions, noise).split(
            [latent.kv_rank, latent.rope_dim], dim=-1
        )
        wide = self.kv_b_proj(self.kv_a_layernorm(narrow), positions, noise)
        key, value = self._heads(wide, latent.nope_dim + latent.value_dim).split(
            [latent.nope_dim, latent.value_dim], dim=-1
        )
        turned = rotate(_in_halves(shared[:, None]), rotation).expand(-1, key.shape[1], -1, -1)
        query = torch.cat([query, rotate(_in_halves(turning), rotation)], dim=-1)
        key = torch.cat([key, turned], dim=-1)
        # Pad values to the width of keys: most devices have no kernels for other widths.
        padding = query.shape[-1] - latent.value_dim
        mixed = self.attend(
            query, key, F.pad(value, (0, padding)), positions, documents, scale=self.scale, window=None
        )
        values = mixed[..., : latent.value_dim].transpose(1, 2).flatten(2)
        output: Tensor = self.o_proj(values, positions, noise)
        return output

    def _queries(self, x: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        if self.q_proj is not None:
            direct: Tensor = self.q_proj(x, positions, noise)
            return direct
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        narrow = self.q_a_layernorm(self.q_a_proj(x, positions, noise))
        projected: Tensor = self.q_b_proj(narrow, positions, noise)
        return projected

    def _heads(self, projected: Tensor, width: int | None = None) -> Tensor:
        """[B, T, heads·width] → [B, heads, T, width]."""
        width = width or self.latent.nope_dim + self.latent.rope_dim
        return projected.unflatten(-1, (-1, width)).transpose(1, 2)


def _in_halves(x: Tensor) -> Tensor:
    """Reorder rotated pairs: this family's weights have them side by side, ``rotate`` expects them half a head apart.

    Queries and keys are reordered alike, so their products do not change.
    """
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
