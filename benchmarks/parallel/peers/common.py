"""What every side of the comparison shares: sizes, a plain decoder, data, optimizer, and a journal of steps.

Needs torch alone, so that each peer runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """A step of these takes some tenths of a second on two cores: neither only overhead nor only matrix products."""

    layers: int = 8
    hidden: int = 256
    ffn: int = 512
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 4096
    seq: int = 128
    batch: int = 8  # sequences a step, over all ranks
    micro: int = 2  # sequences of one forward and backward pass

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq


SIZES = Sizes()
SEED = 7
NORM_EPS = 1e-5
ROPE_THETA = 10000.0
INIT_STD = 0.02
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
CLIP = 1.0


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZES.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, kv_width = SIZES.heads * SIZES.head_dim, SIZES.kv_heads * SIZES.head_dim
        self.q_proj = nn.Linear(SIZES.hidden, width, bias=False)
        self.k_proj = nn.Linear(SIZES.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(SIZES.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, SIZES.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        # The number of heads is read off the tensor: under tensor parallelism a rank has some of them.
        query, key, value = (
            projected.unflatten(-1, (-1, SIZES.head_dim)).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(SIZES.hidden, SIZES.ffn, bias=False)
        self.up_proj = nn.Linear(SIZES.hidden, SIZES.ffn, bias=False)
        self.down_proj = nn.Linear(SIZES.ffn, SIZES.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm()
        self.mlp = MLP()

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Tokens in, logits out. A pipeline stage sets the parts that it does not have to None."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding | None = nn.Embedding(SIZES.vocab, SIZES.hidden)
        self.layers = nn.ModuleList(Block() for _ in range(SIZES.layers))
        self.norm: RMSNorm | None = RMSNorm()
        self.lm_head: nn.Linear | None = nn.Linear(SIZES.hidden, SIZES.vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        # A plain attribute and no buffer: DDP would send buffers around before every forward pass.
        self.rotation = rotation_tables()

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            hidden = self.embed_tokens(hidden)
        for block in self.layers:
            hidden = block(hidden, self.rotation)
        if self.norm is not None and self.lm_head is not None:
            hidden = self.lm_head(self.norm(hidden))
        return hidden


def rotation_tables() -> tuple[Tensor, Tensor]:
    pair = torch.arange(SIZES.head_dim // 2, dtype=torch.float64)
    turning = (ROPE_THETA ** (-2.0 * pair / SIZES.head_dim)).float()
    angles = torch.arange(SIZES.seq).float()[:, None] * turning
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def build(tied: bool) -> Decoder:
    """The whole model with the same first weights in every process."""
    model = Decoder(tied)
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=INIT_STD, generator=generator)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Weight decay on matrices only, as Shoal has it."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rows(step: int, positions: range) -> tuple[Tensor, Tensor]:
    """Tokens and targets at these places of a step's global batch: bytes of a hash, so ids below 256."""
    texts = [
        list(hashlib.shake_256(f"{SEED} {step} {position}".encode()).digest(SIZES.seq + 1))
        for position in positions
    ]
    tokens = torch.tensor(texts)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def positions_of(data_rank: int, data_ranks: int) -> list[range]:
    """A data rank's part of the global batch, one range a micro-batch."""
    share = SIZES.batch // data_ranks
    first = data_rank * share
    return [range(start, start + SIZES.micro) for start in range(first, first + share, SIZES.micro)]


def options() -> argparse.Namespace:
    """What every side is told on its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tied", action="store_true", help="embedding and head are one matrix")
    parser.add_argument("--stage", type=int, default=3, help="of DeepSpeed's ZeRO")
    return parser.parse_args()


def join() -> tuple[int, int]:
    """Rank and world of this process, once it has joined the others as its environment says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def mean_over_ranks(value: Tensor) -> float:
    """What a training loop logs."""
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


class Journal:
    """Yields a step's micro-batches, takes its loss, and times what lies between; the first rank prints it all."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._started = 0.0

    def micro_batches(self, data_rank: int, data_ranks: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        for step in range(1, self.steps + 1):
            batches = [rows(step, positions) for positions in positions_of(data_rank, data_ranks)]
            self._started = time.perf_counter()
            yield batches

    def finish_step(self, loss: float) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self.losses.append(loss)

    def close(self, **versions: str) -> None:
        report(self.seconds, self.losses, **versions)
        dist.destroy_process_group()


def report(seconds: list[float], losses: list[float], **versions: str) -> None:
    """One line of JSON, from the first rank."""
    if dist.get_rank() == 0:
        versions = {"torch": torch.__version__, **versions}
        print(json.dumps({"step_s": seconds, "losses": losses, "versions": versions}), flush=True)
