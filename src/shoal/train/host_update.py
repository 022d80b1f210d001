"""The optimizer's update of offloaded pieces, on the host's cores (``parallel/offload/states.py``).

A thread of its own waits until the norm of all gradients is known, so that clipping is exact without speculation, and
then updates piece by piece in the order of the forward pass. What is done with returns to the device at once, and the
next forward pass waits at each block for that block alone: the update hides behind it. Pieces are cut into parts that a
cache holds: a part's gradient is widened, used and forgotten, and its new weight narrowed, without a way to memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.model.parameters import block_of
from shoal.parallel.apply import Placed
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.host_memory import HostThread
from shoal.parallel.offload.states import OffloadedStates
from shoal.parallel.shards import Shard
from shoal.train.adamw import AdamW, HostPart, HostUpdateOf
from shoal.train.optimizer import CLIP_EPS, refuses

# Elements of a part for each thread: long enough that threads seldom wait for one another, short enough that what is
# widened for it stays in a cache.
PART = 2**18


class HostUpdate:
    """Updates what the host has, and lets the network wait for it."""

    def __init__(
        self, placed: Placed, offloaded: OffloadedStates, optimizer: torch.optim.Optimizer, mesh: Mesh
    ) -> None:
        self.offloaded, self.optimizer, self.ahead = offloaded, optimizer, placed.reads_ahead
        self.threads = max(1, usable_threads() * mesh.nodes // mesh.world)
        self.part = PART * self.threads
        self.sharded = any(piece.held.group.fully_sharded for piece in offloaded.pieces)
        groups: dict[int, list[Shard]] = {}
        last = 1 + max(int(name) for segment in placed.segments for name in segment.network.model.layers)
        for piece in offloaded.pieces:
            groups.setdefault(self._place(piece, last), []).append(piece)
        self.groups = dict(sorted(groups.items()))
        # Of the optimizer's: looked up once, for there are hundreds of pieces and a step has no time for it.
        options = {weight: group for group in optimizer.param_groups for weight in group["params"]}
        self.options = {piece: options[piece.tensor] for piece in offloaded.pieces}
        self._thread = HostThread("shoal-update", mesh.device, self.threads)
        # A part's gradient, widened. Made once: memory that is new costs a page fault every 4 KiB, on an H200's host
        # more time than the update itself.
        largest = max((piece.tensor.numel() for piece in offloaded.pieces), default=0)
        self._wide = torch.empty(min(self.part, largest), dtype=offloaded.states, device="cpu")
        self._running: Future[None] | None = None
        self._passed = threading.Condition()
        self._reached = math.inf  # groups up to this one have returned
        self._ends: dict[int, torch.cuda.Event] = {}
        if self.ahead is not None:
            self._watch(placed, last, self.ahead)

    def start(self, norm: Tensor, limit: float, most: float) -> Future[None]:
        """Update once this norm is known, clipped to ``limit``; not where it is not finite, or above ``most``."""
        self.wait()
        known = norm.detach().to("cpu", torch.float64, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        self._reached = -1.0
        ready = {
            piece: (state.arriving(), on_host(self.optimizer, piece.tensor, self.options[piece]))
            for piece, state in self.offloaded.away.items()
        }
        self._running = self._thread.submit(self._update, ready, known, event, limit, most)
        running = self._running
        if self.ahead is None:
            self.wait()
        return running

    def wait(self) -> None:
        """Until everything is back."""
        if self._running is not None:
            self._running.result()
            self._running = None
            for event in self._ends.values():
                event.synchronize()
            self._ends.clear()

    def wait_for(self, group: float) -> None:
        """Until pieces up to this group are back, as the next forward pass needs them."""
        running = self._running
        if running is None:
            return
        with self._passed:
            self._passed.wait_for(lambda: self._reached >= group)
            ends = [self._ends.pop(number) for number in list(self._ends) if number <= group]
        if running.done():
            running.result()  # its error, if it had one
        for end in ends:
            # Not in a stream alone: FSDP reads weights in streams of its own.
            end.synchronize()

    def _place(self, piece: Shard, last: int) -> int:
        """When it is needed: a block's number, counted from 1. FSDP gathers a network's two ends together."""
        if (block := block_of(piece.held.label)) is not None:
            return 1 + block
        return 0 if self.sharded or ".embed_" in piece.held.label else last + 1

    def _watch(self, placed: Placed, last: int, ahead: int) -> None:
        for segment in placed.segments:
            decoder = segment.network.model
            _before(segment, partial(self.wait_for, ahead))
            for name, block in decoder.layers.items():
                _before(block, partial(self.wait_for, 1 + int(name) + ahead))
            if decoder.norm is not None:
                _before(decoder.norm, partial(self.wait_for, last + 1))

    @torch.no_grad()
    def _update(
        self,
        ready: dict[Shard, tuple[Callable[[], Tensor], HostUpdateOf]],
        norm: Tensor,
        known: torch.cuda.Event | None,
        limit: float,
        most: float,
    ) -> None:
        """As ``clip_and_update`` does on a device: what is refused is decided by tensors, not by branches."""
        try:
            if known is not None:
                known.synchronize()
            refused = refuses(norm, most).float()
            scale = ((norm + CLIP_EPS) / limit).clamp(min=1.0) if limit else torch.ones_like(norm)
            for number, pieces in self.groups.items():
                for piece in pieces:
                    arriving, begin = ready[piece]
                    self._update_piece(piece, arriving(), begin(refused), refused, scale)
                self._pass(number)
        finally:
            self._pass(math.inf)

    def _pass(self, number: float) -> None:
        back = self.offloaded.streams.back
        with self._passed:
            if back is not None and number != math.inf:
                self._ends[int(number)] = back.record_event()
            self._reached = number
            self._passed.notify_all()

    def _update_piece(
        self, piece: Shard, gradient: Tensor, update: HostPart, refused: Tensor, scale: Tensor
    ) -> None:
        state = self.offloaded.away[piece]
        working, weight = piece.working, piece.tensor.detach().view(-1)
        assert working is not None
        steered = {"found_inf": refused}
        exact = weight.dtype == torch.float64  # for which the scale that torch takes, fp32, is too coarse
        if not exact:
            steered["grad_scale"] = scale.float()
        # Written part by part behind what is read.
        returned = state.way_back(working)
        for start in range(0, weight.numel(), self.part):
            part = slice(start, min(start + self.part, weight.numel()))
            wide = self._wide[: part.stop - start].copy_(gradient.view(-1)[part])
            if exact:
                wide /= scale
            update(part, wide, steered)
            returned[part].copy_(weight[part])
        if state.rests:
            return  # the next pass fetches it
        if (back := self.offloaded.streams.back) is None:
            working.copy_(returned.view_as(working))
            return
        # All that has read the weights as they were has ended: the norm came after it.
        with torch.cuda.stream(back):
            working.copy_(returned.view_as(working), non_blocking=True)


def _before(module: nn.Module, wait: Callable[[], None]) -> None:
    def hook(*_: Any) -> None:
        wait()

    # Before FSDP's own, which gathers.
    module.register_forward_pre_hook(hook, prepend=True)


def on_host(optimizer: torch.optim.Optimizer, weight: Tensor, group: dict[str, Any]) -> HostUpdateOf:
    """The next update of a weight of the host's, made ready: its states are there."""
    if isinstance(optimizer, AdamW):
        return optimizer.on_host(weight, group)
    momentum: Tensor | None = optimizer.state[weight].get("momentum_buffer")

    def update(part: slice, gradient: Tensor, steered: dict[str, Any]) -> None:
        sgd(
            [weight.detach().view(-1)[part]],
            [gradient],
            [None if momentum is None else momentum.view(-1)[part]],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,
            **steered,
        )

    return lambda refused: update
