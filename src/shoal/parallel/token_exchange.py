"""Rows that travel between ranks, so many to each: begun, and later waited for, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class TokenExchange:
    """Rows to the ranks of a group, so many to each, and their gradients back: begun, and later waited for."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> None:
        self.sent, self.received, self.group = sent, received, group
        # What arrives, what was sent, which must stay until then, and the work itself.
        self._under_way: tuple[Tensor, Tensor, dist.Work] | None = None

    def begin(self, rows: Tensor, back: bool = False) -> Tensor:
        """What will have arrived when it has been waited for."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(arriving, rows, received, sent, group=self.group, async_op=True)
        self._under_way = arriving, rows, work
        return arriving

    def wait(self) -> Tensor:
        assert self._under_way is not None
        (arrived, _, work), self._under_way = self._under_way, None
        work.wait()
        return arrived


def depart(rows: Tensor, exchange: TokenExchange) -> Tensor:
    """Begin; what arrives is not there before ``arrive``."""
    arriving: Tensor = _Depart.apply(rows, exchange)
    return arriving


def arrive(arriving: Tensor, exchange: TokenExchange) -> Tensor:
    arrived: Tensor = _Arrive.apply(arriving, exchange)
    return arrived


class _Depart(torch.autograd.Function):
    """Rows begin to travel. In the backward pass the wait for their gradients, which ``_Arrive`` has sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    """The wait for rows. In the backward pass their gradients begin to travel.

    They have another shape where they arrive, so what autograd is given meanwhile are the gradients that were sent.
    """

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin(gradient, back=True)
        return gradient, None
