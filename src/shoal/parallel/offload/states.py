"""Offload of optimizer states: master copies, moments and the update are the host's; weights stay on the device.

A gradient leaves the device as soon as it is complete for its micro-batch, in the backward pass: with one data rank as
it is computed, with ``zero=3`` and ``zero=2`` as it is summed. Elsewhere, and in a pipeline, it leaves at the end of a
step. Where a step has several micro-batches, what leaves early is added up on the host, as wide as it would be on the
device, by a thread of its own. The update itself is that of ``train/host_update.py``; which pieces are offloaded is
decided in ``facts/layout/offload.py``.

On a CPU there are no streams, a copy is done when it is begun, and all else is the same.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.facts.layout.offload import IN_FLIGHT, offloaded
from shoal.facts.model.parameters import CORRECTION, block_of
from shoal.parallel.offload.activations import CopyStreams
from shoal.parallel.offload.direct_files import Files, FileTransfer
from shoal.parallel.offload.host_memory import HostBuffer, HostMemory, HostThread
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.offload.state_files import GRADIENT, FiledPiece, StateFiles
from shoal.parallel.shards import Shard
from shoal.parallel.shards import gradient as gradient_of
from shoal.parallel.stage_module import local_tensor

ALIGNED = 16  # bytes, for elements of any width


class Leaving(NamedTuple):
    """A gradient on its way to the host."""

    unit: object  # what it came with
    gradient: Tensor
    stream: torch.cuda.Stream | None  # that it was made in
    left: torch.cuda.Event | FileTransfer | None


class AwayState:
    """Of one piece whose master copy and moments the host has: its gradient there, and its new weight's way back.

    A new weight takes the place of the gradient that made it, which is at least as wide.
    """

    def __init__(self, piece: Shard, memory: HostMemory, in_file: bool) -> None:
        """From now on the optimizer updates a tensor of the host's, which the device's values follow.

        ``in_file``: that one has its values in a file (``state_files.py``), and no memory here.
        """
        self.memory = memory
        # New weights are written where they rest. Those that rest in a file are sent there.
        self.rests = piece.held.home is not None and piece.held.home_file is None
        device = piece.tensor.detach() if piece.working is None else piece.working
        piece.working, piece.away = device, self
        if not in_file:
            # What the host itself works on needs no pinned memory. Values are yet to come.
            piece.tensor = nn.Parameter(torch.zeros(device.shape, dtype=piece.tensor.dtype, device="cpu"))
        self.room: HostBuffer | None = None
        self.gradient: Tensor | None = None  # where it waits for the update
        self.times = 0  # micro-batches whose gradients have left, in this step
        self.early = False  # whether they leave in the backward pass
        self.landing: Future[None] | None = None
        self.left: torch.cuda.Event | None = None
        self.filed: FiledPiece | None = None  # where the gradient waits in a file
        self.squares: dict[int, float] = {}  # of one that adds up there, of each part
        self.read: threading.Event | None = (
            None  # the gradient, for the last time, by an update whose states are late
        )

    def room_for(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Where its gradient waits, made when the first one leaves."""
        if self.gradient is None or self.gradient.dtype != dtype:
            if self.room is not None:
                self.memory.release(self.room)
            self.room = self.memory.take(like.numel() * dtype.itemsize)
            self.gradient = self.room.bytes.view(dtype).view(like.shape)
        return self.gradient

    def wait_until_read(self) -> None:
        """Until the gradient of the step before may be overwritten."""
        if self.read is not None:
            self.read.wait()
            self.read = None

    def way_back(self, working: Tensor) -> Tensor:
        """Where new weights wait for the device: flat, from the beginning of where the gradient is.

        Those that rest in the host's memory are where they belong.
        """
        if self.rests:
            return working.view(-1)
        assert self.room is not None
        return self.room.bytes.view(working.dtype)[: working.numel()]

    def arrived(self) -> Tensor | None:
        """The gradient, when all of it is here; None where none has left. A copy, where it is in a file."""
        if self.filed is not None:
            return self.filed.read(GRADIENT) if self.times else None
        return self.arriving()() if self.times else None

    def arriving(self) -> Callable[[], Tensor]:
        """Waits for the gradient of this step, also when the next step has begun."""
        landing, left, gradient = self.landing, self.left, self.gradient
        assert gradient is not None

        def wait() -> Tensor:
            if landing is not None:
                landing.result()
            if left is not None:
                left.synchronize()
            return gradient

        return wait


class LandingBuffer:
    """Where gradients arrive that are then added up elsewhere: a ring, taken from the front as it is emptied behind."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._bytes = buffer.bytes
        self._taken: deque[tuple[int, int, Future[None]]] = deque()  # from, to, and until when
        self._last = 0, 0

    @property
    def most(self) -> int:
        """Bytes that can be taken at once, with as many beside them."""
        return self._bytes.numel() // IN_FLIGHT // ALIGNED * ALIGNED or self._bytes.numel()

    def take(self, size: int) -> Tensor:
        """So many bytes, as soon as what arrived there before has been read."""
        start = -(-self._last[1] // ALIGNED) * ALIGNED
        if start + size > self._bytes.numel():
            start = 0
        self._last = start, start + size
        while any(one < start + size and start < other for one, other, _ in self._taken):
            self._taken.popleft()[2].result()
        return self._bytes[start : start + size]

    def taken(self, until: Future[None]) -> None:
        self._taken.append((*self._last, until))


class OffloadedStates:
    """The pieces of a rank whose states the host has."""

    def __init__(
        self,
        pieces: list[Shard],
        memory: HostMemory,
        fraction: float,
        states: torch.dtype,
        files: Files | None = None,
        staged: StagedFiles | None = None,
    ) -> None:
        """``files``: where states rest that are not to take the host's memory either. ``staged``: gradients too."""
        self.memory, self.states = memory, states
        self.streams = CopyStreams(memory)
        first = offloaded([piece.stop - piece.start for piece in pieces], fraction)
        # What routers are corrected by is not the optimizer's, and tiny.
        self.pieces = [
            piece
            for number, piece in enumerate(pieces)
            # A parameter that rests away is updated away, also where data ranks cut it at another place.
            if (number >= first or piece.held.home is not None) and not piece.name.endswith(CORRECTION)
        ]
        away = set(self.pieces)
        for piece in pieces:
            if piece not in away and piece.tensor.is_meta:
                _make_here(piece)
        self.away = {piece: AwayState(piece, memory, files is not None) for piece in self.pieces}
        self.filed = StateFiles(self.pieces, files, memory) if files is not None else None
        self.staged = staged if self.filed is not None else None
        if self.filed is not None and staged is not None:
            for piece, state in self.away.items():
                state.filed = self.filed.filed[piece]
        self.micro_batches = 1  # of this step
        sizes: Counter[int] = Counter()
        for piece in self.pieces:
            if (block := block_of(piece.held.label)) is not None:
                sizes[block] += piece.stop - piece.start
        # Parameters of the largest block: as many pass through a buffer at once.
        self.block = max(sizes.values(), default=1)
        # What gradients came with last, also those that stay; and the one that they come with.
        self._coming: deque[object] = deque(maxlen=IN_FLIGHT)
        self._unit: object = None
        self._leaving: deque[Leaving] = deque()
        self._adder = HostThread("shoal-gradients", memory.device)
        self._landing: LandingBuffer | None = None

    def take_early(self, parameter: Tensor, piece: Shard, stays: bool) -> None:
        """From now on a gradient of this parameter is its piece's as soon as there is one.

        ``stays``: on the device until ``leave_rest``, because other ranks' are added to it, or for good. FSDP would
        add several micro-batches up in the precision of the weights.
        """
        leaves = piece.away is not None and not stays
        if piece.away is not None:
            piece.away.early = leaves
        parameter.register_post_accumulate_grad_hook(self._send(piece) if leaves else self._hold(piece))

    def start_step(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        for piece, state in self.away.items():
            state.times, state.landing, state.left = 0, None, None
            state.squares.clear()
            piece.squares = None

    @property
    def several(self) -> bool:
        """Whether gradients are added up on the host."""
        return self.micro_batches > 1

    def leave(self, piece: Shard, gradient: Tensor, complete: bool = False, together: object = None) -> None:
        """A gradient that the device has no more use for. ``complete``: nothing will be added to it.

        ``together``: what it arrives with, if not with those of its block.
        """
        state, gradient = self.away[piece], gradient.detach()
        state.wait_until_read()
        # Gradients of a block come together, and those of the network's ends.
        self.make_room(block_of(piece.held.label) if together is None else together)
        if complete or not self.several:
            # Measured where it is quickest.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            piece.squares = torch.linalg.vector_norm(gradient, dtype=wide).double().square()
            assert piece.working is not None
            if gradient.element_size() < piece.working.element_size():
                gradient = gradient.to(piece.tensor.dtype)  # its new weight would have no room in its place
            if not self._send_to_file(state, gradient):
                room = state.room_for(gradient, gradient.dtype)
                state.left = self._copy(gradient, room, gradient)
        elif not self._send_to_file(state, gradient, adds_up=True):
            self._add(state, gradient)
        state.times += 1

    def leave_rest(self) -> None:
        """What is still on the device, at the end of a step."""
        for piece, state in self.away.items():
            if not state.times:
                self.leave(piece, gradient_of(piece), complete=True)
                piece.summed = None
        self.let_go()
        for piece, state in self.away.items():
            if piece.squares is None and state.squares:
                # Measured as they were added up.
                total = sum(state.squares.values())
                piece.squares = torch.tensor(total, dtype=torch.float64, device=self.memory.device)

    def let_go(self, *_: object) -> None:
        """Of what has left; to be called before the fullest moment of a pass, its loss."""
        while self._leaving:
            self._let_go()

    def let_go_but(self, unit: object) -> None:
        """Of all but what came with ``unit``, the block behind; to be called as a block's backward pass begins, whose
        first product is large."""
        while self._leaving and self._leaving[0].unit != unit:
            self._let_go()

    def _send(self, piece: Shard) -> Callable[[Tensor], None]:
        def leave(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.leave(piece, local_tensor(parameter.grad))
            parameter.grad = None

        return leave

    def _hold(self, piece: Shard) -> Callable[[Tensor], None]:
        def keep(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad)
            self.make_room(block_of(piece.held.label))
            if piece.summed is None:
                # A copy: FSDP's is part of its unit's, which would stay with it.
                piece.summed = gradient.to(self.states, copy=True)
            else:
                piece.summed += gradient
            parameter.grad = None

        return keep

    def make_room(self, unit: object) -> None:
        """A gradient's memory is used again when it has been copied: those of two units may be on their way.

        To be called as gradients of one come, also of one whose gradients all stay.
        """
        self._unit = unit
        if (
            unit not in self._coming
        ):  # the last norm's gradient comes among those of a block, and is the head's unit
            self._coming.append(unit)
        while self._leaving and self._leaving[0].unit not in self._coming:
            self._let_go()

    def _copy(self, part: Tensor, room: Tensor, gradient: Tensor) -> torch.cuda.Event | None:
        """``part`` of a gradient, whose memory ``gradient`` holds until it has left."""
        stream = left = None
        if (out := self.streams.out) is None:
            room.copy_(part)
        else:
            stream = torch.cuda.current_stream()
            out.wait_stream(stream)
            with torch.cuda.stream(out):
                room.copy_(part, non_blocking=True)
            left = out.record_event()
        self._leaving.append(Leaving(self._unit, gradient, stream, left))
        return left

    def _send_to_file(self, state: AwayState, gradient: Tensor, adds_up: bool = False) -> bool:
        """Whether it goes there. It is held until it has gone."""
        if self.staged is None or state.filed is None:
            return False
        if adds_up:
            name, first = state.filed.begin_gradient(self.states), state.times == 0
            left = self.staged.add(name, gradient, self.states, first, state.squares)
        else:
            left = self.staged.send(state.filed.begin_gradient(gradient.dtype), gradient)
        self._leaving.append(Leaving(self._unit, gradient, None, left))
        return True

    def _let_go(self) -> None:
        gone = self._leaving.popleft()
        if gone.left is not None and not isinstance(gone.left, torch.cuda.Event):
            gone.left.result()
        elif gone.stream is not None and gone.left is not None:
            # In the stream that it was made in, whose memory it is: FSDP has one of its own.
            gone.stream.wait_event(gone.left)

    def _add(self, state: AwayState, gradient: Tensor) -> None:
        """To what has arrived of earlier micro-batches, through a buffer that all pieces share."""
        room, flat, first = state.room_for(gradient, self.states), gradient.reshape(-1), state.times == 0
        if self._landing is None:
            self._landing = LandingBuffer(self.memory.take(IN_FLIGHT * self.block * gradient.element_size()))
        most = self._landing.most // gradient.element_size()
        for start in range(0, flat.numel(), most):
            part = flat[start : start + most]
            landed = self._landing.take(part.nbytes).view(gradient.dtype)
            left = self._copy(part, landed, flat)
            done = self._adder.submit(_add_up, room.view(-1)[start : start + most], landed, left, first)
            self._landing.taken(done)
            state.landing = done


def _add_up(room: Tensor, landed: Tensor, left: torch.cuda.Event | None, first: bool) -> None:
    if left is not None:
        left.synchronize()
    if first:
        room.copy_(landed)
    else:
        room.add_(landed)


def _make_here(piece: Shard) -> None:
    """The master copy of a piece that stays: none was made before it was known which those are."""
    assert piece.working is not None
    # As wide as what the network reads it is that.
    same = piece.working.dtype == piece.tensor.dtype
    made = nn.Parameter(piece.working if same else torch.empty_like(piece.working, dtype=piece.tensor.dtype))
    made.grad_dtype = piece.tensor.grad_dtype
    piece.tensor = made
