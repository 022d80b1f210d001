"""Plain PyTorch on one device, carefully written: blocks compiled on a GPU, bf16 weights with fp32 master weights, a
loss that never holds all logits, fused AdamW. Public torch only, without custom kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.prove.bench.journal import Journal
from shoal.prove.bench.plain_decoder import PlainDecoder
from shoal.prove.bench.setup import PeerSetup

# Tokens whose logits exist at the same time.
CHUNK = 4096

Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def train(setup: PeerSetup, journal: Journal) -> None:
    decoder = setup.decoder()
    masters = MasterWeights(decoder, setup) if setup.mixed else None
    optimizer = setup.adamw(decoder.parameters()) if masters is None else masters
    setup.compile_blocks(decoder.layers)
    gradient: Gradient = loss_and_gradient
    if setup.compiled and setup.device.type == "cuda":
        gradient = torch.compile(loss_and_gradient, dynamic=False)
    assert decoder.lm_head is not None
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            hidden, targets = decoder.hidden(batch.tokens).flatten(0, 1), batch.targets.flatten()
            loss = ChunkedCrossEntropy.apply(hidden, decoder.lm_head.weight, targets, gradient) / len(batches)
            loss.backward()
            total += loss.detach()
        setup.clip(decoder.parameters())
        optimizer.step()
        optimizer.zero_grad()
        journal.note(total)


class MasterWeights:
    """fp32 master weights and moments; the network computes with copies in its own precision."""

    def __init__(self, decoder: PlainDecoder, setup: PeerSetup) -> None:
        self._masters = [nn.Parameter(one.detach().clone()) for one in decoder.parameters()]
        decoder.to(setup.compute)
        self._copies = list(decoder.parameters())
        self._optimizer = setup.adamw(self._masters)

    @torch.no_grad()
    def step(self) -> None:
        for copy, master in zip(self._copies, self._masters, strict=True):
            assert copy.grad is not None
            master.grad, copy.grad = copy.grad.to(master.dtype), None
        self._optimizer.step()
        for copy, master in zip(self._copies, self._masters, strict=True):
            copy.copy_(master)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and mean cross-entropy of hidden [T, h]: gradients are computed chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, gradient: Gradient) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            summed, of_logits = gradient(hidden[part] @ weight.T, targets[part])
            total += summed
            torch.mm(of_logits, weight, out=of_hidden[part])
            of_weight.addmm_(of_logits.T, hidden[part])
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.count = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0] / ctx.count
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden.mul_(scale), of_weight.mul_(scale), None, None


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over rows, and its gradient with respect to the logits."""
    scores = logits.float()
    whole = torch.logsumexp(scores, dim=-1, keepdim=True)
    picked = scores.gather(-1, targets[:, None])
    hit = torch.arange(scores.shape[-1], device=scores.device) == targets[:, None]
    of_logits = torch.exp(scores - whole) - hit.float()
    return (whole - picked).sum(), of_logits.to(logits.dtype)
