"""The optimizer's update of offloaded pieces, on the host's cores (``parallel/offload/states.py``).

A thread waits until the norm of all gradients is known, so clipping is exact without speculation, and then updates
piece by piece in forward order. Finished weights return to the device at once, and the next forward pass waits at each
block for that block only, so it hides the update. For some pieces only the new weights are computed then; their states
are written during the following backward pass (``train/late_states.py``).

AdamW makes one pass over a piece (``train/host_adamw.py``). Without that kernel, pieces are cut into parts that fit in
cache: a part's gradient is widened and used, and its new weight narrowed, without a round trip to memory.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.layout.offload import states_may_be_late, waiting
from shoal.facts.model.parameters import block_of
from shoal.facts.recipe import Recipe
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import FileTransfer
from shoal.parallel.offload.host_memory import HostThread
from shoal.parallel.offload.return_ring import ReturnRing
from shoal.parallel.offload.state_files import GRADIENT, new_weights
from shoal.parallel.offload.states import OffloadedStates
from shoal.parallel.placed import Placed
from shoal.parallel.shards import Shard, goes_home
from shoal.train import host_adamw
from shoal.train.adamw import AdamW, HostPart
from shoal.train.late_states import NONE_LATE, LateStates
from shoal.train.optimizer import CLIP_EPS, refuses
from shoal.train.rounding import parts

# Elements per thread of a part: long enough that threads rarely wait for each other, short enough that the widened part
# stays in cache.
PART = 2**18

# Updates some elements of a piece. Arguments: states by name, index of the first element, gradients, and room for the
# new weights.
StretchUpdate = Callable[[dict[str, Tensor], int, Tensor, Tensor], None]


class HostUpdate:
    """Updates offloaded pieces, and lets the network wait for them."""

    def __init__(
        self,
        placed: Placed,
        offloaded: OffloadedStates,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        mesh: Mesh,
    ) -> None:
        self.offloaded, self.optimizer, self.ahead = offloaded, optimizer, placed.reads_ahead
        # Why AdamW runs in parts, if it does.
        self.problem = host_adamw.problem() if isinstance(optimizer, AdamW) else None
        self.threads = max(1, usable_threads() * mesh.nodes // mesh.world)
        self.part = PART * self.threads
        self.sharded = any(piece.held.group.fully_sharded for piece in offloaded.pieces)
        groups: dict[int, list[Shard]] = {}
        last = 1 + max(int(name) for segment in placed.segments for name in segment.network.model.layers)
        for piece in offloaded.pieces:
            groups.setdefault(self._place(piece, last), []).append(piece)
        self.groups = dict(sorted(groups.items()))
        if offloaded.filed is not None:
            offloaded.filed.in_order([piece for group in self.groups.values() for piece in group])
        # The optimizer's options, looked up once: there are hundreds of pieces, and a step has no time for it.
        options = {weight: group for group in optimizer.param_groups for weight in group["params"]}
        self.options = {piece: options[piece.tensor] for piece in offloaded.pieces}
        self._thread = HostThread("shoal-update", mesh.device, self.threads)
        # A part's widened gradient, or its narrowed new weight. Allocated once: fresh memory costs a page fault every 4
        # KiB, which took longer than the update itself on an H200's host.
        largest = max((piece.tensor.numel() for piece in offloaded.pieces), default=0)
        self._room = torch.empty(min(self.part, largest), dtype=offloaded.states, device="cpu")
        # Pieces whose states may be late. On a CPU nothing overlaps with the device.
        may_be_late = states_may_be_late(recipe, mesh.layout) and self.problem is None
        resting = waiting(mesh.layout.offload, "params") is not None
        order = [piece for group in self.groups.values() for piece in group]
        self.late: LateStates | None = None
        self._way_back: ReturnRing | None = None
        if may_be_late and order:
            self.late = LateStates([piece for piece in order if offloaded.away[piece].rests or not resting])
            if not resting:
                elements = _elements(order)
                assert order[0].working is not None
                dtype = order[0].working.dtype
                self._way_back = ReturnRing(elements, dtype, offloaded.memory, offloaded.streams)
        self._running: Future[None] | None = None
        self._going: deque[FileTransfer] = deque()  # new weights in flight to their files
        self._passed = threading.Condition()
        self._reached = math.inf  # groups up to this one have returned
        self._ends: dict[int, torch.cuda.Event] = {}
        if self.ahead is not None:
            self._watch(placed, last, self.ahead)

    def start(self, norm: Tensor, limit: float, most: float) -> Future[None]:
        """Start an update that waits for the norm and clips to ``limit``; it does nothing if the norm is not finite
        or above ``most``.
        """
        self.wait()
        known = norm.detach().to("cpu", torch.float64, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        self._reached = min(self.groups, default=0) - 1.0  # everything before is on the device only
        arriving = {
            piece: state.arriving() for piece, state in self.offloaded.away.items() if state.filed is None
        }
        if isinstance(self.optimizer, AdamW):
            # Even if this update is refused, as all are in a dry run.
            for piece in self.offloaded.pieces:
                self.optimizer.started(piece.tensor)
        if self.offloaded.filed is not None:
            self.offloaded.filed.begin()
        late = NONE_LATE
        if self.late is not None and self._thread.beside:
            late = self.late.choose(self.offloaded.micro_batches)
        for piece in late:
            self.offloaded.away[piece].read = threading.Event()
        self._running = self._thread.submit(self._update, arriving, late, known, event, limit, most)
        running = self._running
        if self.ahead is None:
            self.wait_for(math.inf)
        return running

    def wait(self) -> None:
        """Wait until all weights are back and all states are written."""
        if self._running is not None:
            self._running.result()
            self._running = None
            for event in self._ends.values():
                event.synchronize()
            self._ends.clear()

    def wait_for(self, group: float) -> None:
        """Wait until pieces up to this group are back, as the next forward pass needs them."""
        running = self._running
        if running is None:
            return
        with self._passed:
            self._passed.wait_for(lambda: self._reached >= group)
            ends = [self._ends.pop(number) for number in list(self._ends) if number <= group]
        if running.done():
            running.result()  # raises its error, if any
        for end in ends:
            # A stream wait is not enough: FSDP reads weights in streams of its own.
            end.synchronize()

    def _place(self, piece: Shard, last: int) -> int:
        """When a piece is needed: its block's number, from 1. FSDP gathers a network's two ends together."""
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
        arriving: dict[Shard, Callable[[], Tensor]],
        late: frozenset[Shard],
        norm: Tensor,
        known: torch.cuda.Event | None,
        limit: float,
        most: float,
    ) -> None:
        """Like ``clip_and_update`` on a device."""
        reading = {piece: self.offloaded.away[piece].read for piece in late}
        try:
            if known is not None:
                known.synchronize()
            if self.late is not None:
                self.late.norm_known(self.offloaded.micro_batches)
            if refuses(norm, most):
                return
            scale = ((norm + CLIP_EPS) / limit).clamp(min=1.0) if limit else torch.ones_like(norm)
            to_write = self._update_groups(arriving, late, scale)
            self._pass(math.inf)
            if self.late is not None:
                self.late.weights_returned()
            # First the pieces whose gradients come first.
            start = time.perf_counter()
            for piece, write in reversed(to_write):
                write()
                if (read := reading[piece]) is not None:
                    read.set()
            if self.late is not None:
                self.late.written(_elements(late), time.perf_counter() - start)
        finally:
            self._pass(math.inf)
            for read in reading.values():
                if read is not None:
                    read.set()

    def _update_groups(
        self, arriving: dict[Shard, Callable[[], Tensor]], late: frozenset[Shard], scale: Tensor
    ) -> list[tuple[Shard, Callable[[], None]]]:
        """Update in forward order; returns functions that write the late states."""
        to_write: list[tuple[Shard, Callable[[], None]]] = []
        whole, spent = 0, 0.0
        for number, pieces in self.groups.items():
            for piece in pieces:
                if piece in late:
                    to_write.append((piece, self._update_weight(piece, arriving[piece], scale)))
                    continue
                start = time.perf_counter()
                self._update_piece(piece, arriving.get(piece), scale)
                whole, spent = whole + piece.stop - piece.start, spent + time.perf_counter() - start
            self._pass(number)
        if self.offloaded.filed is not None:
            self.offloaded.filed.finish()
        while self._going:
            self._going.popleft().result()
        if self.late is not None:
            self.late.written(whole, spent)
        return to_write

    def _pass(self, number: float) -> None:
        back = self.offloaded.streams.back
        with self._passed:
            if back is not None and number != math.inf:
                self._ends[int(number)] = back.record_event()
            self._reached = number
            self._passed.notify_all()

    def _update_piece(self, piece: Shard, arriving: Callable[[], Tensor] | None, scale: Tensor) -> None:
        """``arriving`` returns the gradient; None if it comes from a file, together with the states."""
        if arriving is None:
            self._update_filed(piece, scale)
            return
        working, gradient = piece.working, arriving().view(-1)
        assert working is not None
        returned = self.offloaded.away[piece].way_back(working)
        # New weights overwrite the gradient, or the old weights if those live on the host.
        apart = self.offloaded.away[piece].rests
        update = self._update_of(piece, gradient.dtype, returned.dtype, scale, apart)
        for start, states in self._lent(piece):
            part = slice(start, start + states["weight"].numel())
            update(states, start, gradient[part], returned[part])
        if apart:
            return  # the next pass fetches it
        if piece.held.home_file is not None:
            # The backward pass fetches from the file, so write it before that. Where ranks all-gather each other's
            # weights, the whole file is written afterwards instead.
            if (rests := goes_home(piece)) is not None:
                self._going.append(rests.send(returned))
            return
        if (back := self.offloaded.streams.back) is None:
            working.copy_(returned.view_as(working))
            return
        # All readers of the old weights have finished: the norm came after them.
        with torch.cuda.stream(back):
            working.copy_(returned.view_as(working), non_blocking=True)

    def _update_weight(
        self, piece: Shard, arriving: Callable[[], Tensor], scale: Tensor
    ) -> Callable[[], None]:
        """Compute only the new weight, leaving states as they were; returns a function that writes the states."""
        working, gradient = piece.working, arriving().view(-1)
        assert working is not None
        settings, threads = self._counted(piece, scale), self.threads
        ((_, states),) = self._lent(piece)
        weight, mean, square = (states[kind] for kind in ("weight", "exp_avg", "exp_avg_sq"))
        if self.offloaded.away[piece].rests:
            home = self.offloaded.away[piece].way_back(working)
            host_adamw.adamw_(weight, mean, square, gradient, home, settings, threads, "narrow")
        else:
            assert self._way_back is not None
            for part, room in self._way_back.through(working.view(-1)):
                here = weight[part], mean[part], square[part], gradient[part]
                host_adamw.adamw_(*here, room, settings, threads, "narrow")

        def write() -> None:
            nothing = torch.empty(0, dtype=working.dtype)
            host_adamw.adamw_(weight, mean, square, gradient, nothing, settings, threads, "states")

        return write

    def _counted(self, piece: Shard, scale: Tensor) -> list[float]:
        """Count an update of a piece, and return its settings."""
        assert isinstance(self.optimizer, AdamW)
        state = self.optimizer.started(piece.tensor)
        state["step"] += 1
        return host_adamw.settings_of(self.options[piece], int(state["step"]), float(scale))

    def _update_filed(self, piece: Shard, scale: Tensor) -> None:
        working, update = piece.working, None
        assert working is not None
        for start, states in self._lent(piece):
            gradient = states.pop(GRADIENT)
            returned = new_weights(piece, gradient)
            if update is None:
                update = self._update_of(piece, gradient.dtype, returned.dtype, scale, apart=False)
            update(states, start, gradient, returned)
            if piece.held.home is None:
                self._return(working.view(-1)[start : start + returned.numel()], returned)

    def _return(self, working: Tensor, returned: Tensor) -> None:
        """Copy new weights to the device, before their room is reused."""
        if (back := self.offloaded.streams.back) is None:
            working.copy_(returned)
            return
        with torch.cuda.stream(back):
            working.copy_(returned, non_blocking=True)
            back.record_event().synchronize()

    def _lent(self, piece: Shard) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield a piece's states by name, stretch by stretch if in files, with the index of each stretch's first
        element.
        """
        if (filed := self.offloaded.filed) is not None:
            yield from filed.lent(piece)
            return
        kept = self.optimizer.state[piece.tensor].items()
        states = {kind: one.view(-1) for kind, one in kept if isinstance(one, Tensor) and one.ndim}
        yield 0, {**states, "weight": piece.tensor.detach().view(-1)}

    def _update_of(
        self, piece: Shard, read: torch.dtype, written: torch.dtype, scale: Tensor, apart: bool
    ) -> StretchUpdate:
        """``apart``: new weights are not written over the gradient."""
        return self._in_one_pass(piece, read, written, scale, apart) or self._in_parts(piece, scale)

    def _in_one_pass(
        self, piece: Shard, read: torch.dtype, written: torch.dtype, scale: Tensor, apart: bool
    ) -> StretchUpdate | None:
        """Count an update and return its kernel call; None if the update runs in parts."""
        optimizer = self.optimizer
        if not isinstance(optimizer, AdamW) or optimizer.rounding is not None or self.problem is not None:
            return None
        if not host_adamw.takes(piece.tensor.dtype, read, written):
            return None
        settings = self._counted(piece, scale)
        # In the gradient's place, narrower weights would overtake the gradients still to be read.
        whole, room = written == read or apart, self._room.view(written)

        def update(states: dict[str, Tensor], start: int, gradient: Tensor, returned: Tensor) -> None:
            length = gradient.numel()
            for part in parts(length, length if whole else self.part):
                found = gradient[part]
                narrow = returned[part] if whole else room[: found.numel()]
                weight, mean, square = (states[kind][part] for kind in ("weight", "exp_avg", "exp_avg_sq"))
                host_adamw.adamw_(weight, mean, square, found, narrow, settings, self.threads)
                if not whole:
                    returned[part].copy_(narrow)

        return update

    def _in_parts(self, piece: Shard, scale: Tensor) -> StretchUpdate:
        update_part = on_host(self.optimizer, piece.tensor, self.options[piece])

        def update(states: dict[str, Tensor], start: int, gradient: Tensor, returned: Tensor) -> None:
            for part in parts(gradient.numel(), self.part):
                here, read = {kind: one[part] for kind, one in states.items()}, gradient[part]
                update_part(here, start + part.start, self._room[: read.numel()].copy_(read), scale)
                returned[part].copy_(here["weight"])  # only overwrites what has been read

        return update


def _elements(pieces: Iterable[Shard]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _before(module: nn.Module, wait: Callable[[], None]) -> None:
    def hook(*_: Any) -> None:
        wait()

    # Before FSDP's own hook, which gathers.
    module.register_forward_pre_hook(hook, prepend=True)


def on_host(optimizer: torch.optim.Optimizer, weight: Tensor, group: dict[str, Any]) -> HostPart:
    """The next update, in parts, of a weight on the host."""
    if isinstance(optimizer, AdamW):
        return optimizer.on_host(weight, group)

    def update(states: dict[str, Tensor], start: int, gradient: Tensor, scale: Tensor) -> None:
        sgd(
            [states["weight"]],
            [gradient.div_(scale)],
            [states.get("momentum_buffer")],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,
        )

    return update
