"""All-to-all of rows between ranks, with uneven splits: started first and waited for later, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class TokenExchange:
    """Sends rows to the ranks of a group, and their gradients back: started first, waited for later."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> None:
        self.sent, self.received, self.group = sent, received, group
        # The receive buffer, the send buffer, which must live until then, and the work itself.
        self._under_way: tuple[Tensor, Tensor, dist.Work] | None = None

    def begin(self, rows: Tensor, back: bool = False) -> Tensor:
        """Start; returns the receive buffer, which is valid once waited for."""
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
    """Start sending; the result is not valid before ``arrive``."""
    arriving: Tensor = _Depart.apply(rows, exchange)
    return arriving


def arrive(arriving: Tensor, exchange: TokenExchange) -> Tensor:
    arrived: Tensor = _Arrive.apply(arriving, exchange)
    return arrived


class _Depart(torch.autograd.Function):
    """Forward: start sending rows. Backward: wait for their gradients, which ``_Arrive`` has sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    """Forward: wait for rows. Backward: start sending their gradients.

    Gradients have another shape where they arrive, so meanwhile autograd gets the gradients that were sent.
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
