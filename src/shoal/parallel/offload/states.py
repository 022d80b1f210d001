"""Offload of optimizer states: master weights, moments and the update are on the host; working weights stay on the
device.

A gradient leaves the device in the backward pass, as soon as it is complete for its micro-batch: with one data rank
when it is computed, with ``zero=3`` and ``zero=2`` when it is reduced. Elsewhere, and in a pipeline, it leaves at the
end of a step. If a step has several micro-batches, gradients that leave early are accumulated on the host, in the dtype
the device would use, by a separate thread. The update itself is in ``train/host_update.py``;
``facts/layout/offload.py`` decides which pieces are offloaded.

On a CPU there are no streams and copies are synchronous; everything else is the same.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.facts.layout.offload import IN_FLIGHT, landing_elements, offloaded
from shoal.facts.model.parameters import CORRECTION, block_of
from shoal.parallel.offload.activations import CopyStreams
from shoal.parallel.offload.direct_files import Files, FileTransfer
from shoal.parallel.offload.host_memory import HostBuffer, HostMemory, HostThread
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.offload.state_files import GRADIENT, PieceOnDisk, StateFiles
from shoal.parallel.shards import Shard
from shoal.parallel.shards import gradient as gradient_of
from shoal.parallel.stage_module import local_tensor

ALIGNED = 16  # bytes, for elements of any width
SQUARED_PART = 2**16  # elements; widened to fp32 they stay in cache


class Leaving(NamedTuple):
    """A gradient in flight to the host."""

    unit: object  # what it came with
    gradient: Tensor
    stream: torch.cuda.Stream | None  # the stream that computed it
    left: torch.cuda.Event | FileTransfer | None


class OffloadedState:
    """The host side of an offloaded piece: its gradient there, and the way back for its new weight.

    A new weight overwrites the gradient that produced it, which is at least as wide.
    """

    def __init__(self, piece: Shard, memory: HostMemory, in_file: bool) -> None:
        """Make the optimizer update a host tensor; the device's values follow it.

        ``in_file``: the values of that tensor are in a file (``state_files.py``) and take no memory here.
        """
        self.memory = memory
        # New weights are written directly to their host memory. Those in a file are sent there.
        self.rests = piece.held.home is not None and piece.held.home_file is None
        device = piece.tensor.detach() if piece.working is None else piece.working
        piece.working, piece.away = device, self
        if not in_file:
            # Memory that only the host uses needs no pinning. Values come later.
            piece.tensor = nn.Parameter(torch.zeros(device.shape, dtype=piece.tensor.dtype, device="cpu"))
        self.room: HostBuffer | None = None
        self.gradient: Tensor | None = None  # where the gradient waits for the update
        self.times = 0  # micro-batches whose gradients have left, in this step
        self.early = False  # whether they leave during the backward pass
        self.landing: Future[None] | None = None
        self.left: torch.cuda.Event | None = None
        self.filed: PieceOnDisk | None = None  # set if the gradient waits in a file
        self.squares: dict[int, float] = {}  # of a gradient accumulated in a file, per part
        self.read: threading.Event | None = (
            None  # set when an update with late states has read the gradient for the last time
        )

    def room_for(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for its gradient, allocated when the first one leaves."""
        if self.gradient is None or self.gradient.dtype != dtype:
            if self.room is not None:
                self.memory.release(self.room)
            self.room = self.memory.take(like.numel() * dtype.itemsize)
            self.gradient = self.room.bytes.view(dtype).view(like.shape)
        return self.gradient

    def wait_until_read(self) -> None:
        """Wait until the previous step's gradient may be overwritten."""
        if self.read is not None:
            self.read.wait()
            self.read = None

    def way_back(self, working: Tensor) -> Tensor:
        """Where new weights wait for their copy to the device: flat, overwriting the gradient from its start.

        Weights that live in host memory are written in place.
        """
        if self.rests:
            return working.view(-1)
        assert self.room is not None
        return self.room.bytes.view(working.dtype)[: working.numel()]

    def arrived(self) -> Tensor | None:
        """The gradient, once all of it has arrived; None if none has left. A copy if it is in a file."""
        if self.filed is not None:
            return self.filed.read(GRADIENT) if self.times else None
        return self.arriving()() if self.times else None

    def arriving(self) -> Callable[[], Tensor]:
        """Returns a function that waits for this step's gradient, even if called when the next step has begun."""
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
    """A ring buffer where gradients arrive before they are accumulated elsewhere."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._bytes = buffer.bytes
        self._taken: deque[tuple[int, int, Future[None]]] = deque()  # start, end, and what frees it
        self._last = 0, 0

    @property
    def most(self) -> int:
        """The most bytes to take at once, so that as many can be in flight beside them."""
        return self._bytes.numel() // IN_FLIGHT // ALIGNED * ALIGNED or self._bytes.numel()

    def take(self, size: int) -> Tensor:
        """``size`` bytes, once whatever arrived there before has been read."""
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
    """The offloaded pieces of a rank."""

    def __init__(
        self,
        pieces: list[Shard],
        memory: HostMemory,
        fraction: float,
        states: torch.dtype,
        files: Files | None = None,
        staged: StagedFiles | None = None,
    ) -> None:
        """``files``: for states that should not take host memory either. ``staged``: the same for gradients."""
        self.memory, self.states = memory, states
        self.streams = CopyStreams(memory)
        first = offloaded([piece.stop - piece.start for piece in pieces], fraction)
        # Routers' bias corrections are tiny and not updated by the optimizer.
        self.pieces = [
            piece
            for number, piece in enumerate(pieces)
            # A parameter that is offloaded is also updated on the host, even where data ranks shard it differently.
            if (number >= first or piece.held.home is not None) and not piece.name.endswith(CORRECTION)
        ]
        away = set(self.pieces)
        for piece in pieces:
            if piece not in away and piece.tensor.is_meta:
                _make_here(piece)
        self.away = {piece: OffloadedState(piece, memory, files is not None) for piece in self.pieces}
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
        elements = sum(piece.stop - piece.start for piece in self.pieces)
        self.landing_elements = round(landing_elements(max(sizes.values(), default=0), elements))
        # What gradients came with last, also those that stay; and the one that they come with.
        self._coming: deque[object] = deque(maxlen=IN_FLIGHT)
        self._unit: object = None
        self._leaving: deque[Leaving] = deque()
        self._adder = HostThread("shoal-gradients", memory.device)
        self._landing: LandingBuffer | None = None

    def take_early(self, parameter: Tensor, piece: Shard, stays: bool, copied: bool = False) -> None:
        """Hand a gradient of this parameter to its piece as soon as there is one.

        ``stays``: it stays on the device until ``leave_rest`` because other ranks' are added to it, or stays for good.
        FSDP would accumulate micro-batches in the weights' dtype. ``copied``: the memory that it comes in is freed
        before it has left.
        """
        leaves = piece.away is not None and not stays
        if piece.away is not None:
            piece.away.early = leaves
        parameter.register_post_accumulate_grad_hook(
            self._send(piece, copied) if leaves else self._hold(piece)
        )

    def make_room_with(self, parameter: Tensor, piece: Shard) -> None:
        """Make room as a gradient of this parameter comes, which stays where it is."""
        unit = block_of(piece.held.label)
        parameter.register_post_accumulate_grad_hook(lambda _: self.make_room(unit))

    def start_step(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        for piece, state in self.away.items():
            state.times, state.landing, state.left = 0, None, None
            state.squares.clear()
            piece.squares = None

    @property
    def several(self) -> bool:
        """Whether gradients are accumulated on the host."""
        return self.micro_batches > 1

    def leave(self, piece: Shard, gradient: Tensor, complete: bool = False, together: object = None) -> None:
        """Send a gradient that the device no longer needs. ``complete``: nothing will be added to it.

        ``together``: the group it arrives with, if not its block's gradients.
        """
        state, gradient = self.away[piece], gradient.detach()
        state.wait_until_read()
        # Gradients of a block arrive together, as do those of the network's ends.
        self.make_room(block_of(piece.held.label) if together is None else together)
        if complete or not self.several:
            # Compute the sum of squares on the device, where it is fastest.
            piece.squares = summed_squares(gradient)
            assert piece.working is not None
            if gradient.element_size() < piece.working.element_size():
                gradient = gradient.to(piece.tensor.dtype)  # else its new weight would not fit in its place
            if not self._send_to_file(state, gradient):
                room = state.room_for(gradient, gradient.dtype)
                state.left = self._copy(gradient, room, gradient)
        elif not self._send_to_file(state, gradient, adds_up=True):
            self._add(state, gradient)
        state.times += 1

    def leave_rest(self) -> None:
        """Send what is still on the device at the end of a step."""
        for piece, state in self.away.items():
            if not state.times:
                self.leave(piece, gradient_of(piece), complete=True)
                piece.summed = None
        self.let_go()
        for piece, state in self.away.items():
            if piece.squares is None and state.squares:
                # Computed while they were accumulated.
                total = sum(state.squares.values())
                piece.squares = torch.tensor(total, dtype=torch.float64, device=self.memory.device)

    def let_go(self, *_: object) -> None:
        """Release gradients that have left. Call it before a pass's memory peak, the loss."""
        while self._leaving:
            self._let_go()

    def let_go_but(self, unit: object) -> None:
        """Release all gradients but those of ``unit``, the next block. Call it as a block's backward pass begins, whose
        first matmul needs memory.
        """
        while self._leaving and self._leaving[0].unit != unit:
            self._let_go()

    def _send(self, piece: Shard, copied: bool) -> Callable[[Tensor], None]:
        def leave(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad)
            self.leave(piece, gradient.clone() if copied else gradient)
            parameter.grad = None

        return leave

    def _hold(self, piece: Shard) -> Callable[[Tensor], None]:
        def keep(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad)
            self.make_room(block_of(piece.held.label))
            if piece.summed is None:
                # A copy: FSDP's gradient is part of its unit's buffer, which would otherwise stay alive.
                piece.summed = gradient.to(self.states, copy=True)
            else:
                piece.summed += gradient
            parameter.grad = None

        return keep

    def make_room(self, unit: object) -> None:
        """Limit gradients in flight to two units': memory is reused once it has been copied.

        Call it as the gradients of a unit arrive, even if all of them stay.
        """
        self._unit = unit
        # The final norm's gradient arrives among a block's, and belongs to the head's unit.
        if unit not in self._coming:
            self._coming.append(unit)
        while self._leaving and self._leaving[0].unit not in self._coming:
            self._let_go()

    def _copy(self, part: Tensor, room: Tensor, gradient: Tensor) -> torch.cuda.Event | None:
        """Copy ``part`` of a gradient to ``room``; hold the gradient until it has left."""
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

    def _send_to_file(self, state: OffloadedState, gradient: Tensor, adds_up: bool = False) -> bool:
        """Send a gradient to its file, if it has one; returns whether it does. The gradient is held until it has
        been sent.
        """
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
            # On the stream that allocated it: FSDP has one of its own.
            gone.stream.wait_event(gone.left)

    def _add(self, state: OffloadedState, gradient: Tensor) -> None:
        """Add to what earlier micro-batches sent, through a buffer shared by all pieces."""
        room, flat, first = state.room_for(gradient, self.states), gradient.reshape(-1), state.times == 0
        if self._landing is None:
            size = IN_FLIGHT * self.landing_elements * gradient.element_size()
            self._landing = LandingBuffer(self.memory.take(size))
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
    """Create the master weights of a piece that stays on the device: their creation waited until it was known which
    stay.
    """
    assert piece.working is not None
    # If the working copy is as wide, it is the master weight.
    same = piece.working.dtype == piece.tensor.dtype
    made = nn.Parameter(piece.working if same else torch.empty_like(piece.working, dtype=piece.tensor.dtype))
    made.grad_dtype = piece.tensor.grad_dtype
    piece.tensor = made


def summed_squares(gradient: Tensor) -> Tensor:
    """The sum of squares in fp64, of squares in fp32 or wider."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.device.type != "cpu" or gradient.dtype == wide:
        return torch.linalg.vector_norm(gradient, dtype=wide).double().square()
    return squares_in_parts(gradient)


# One operator for a dry run, which counts operators and has no values to add up.
@torch.library.custom_op("shoal::squares_in_parts", mutates_args=())
def squares_in_parts(gradient: Tensor) -> Tensor:
    """The sum of squares of a narrow gradient on a CPU.

    torch would first widen all of it, in fresh memory, whose page faults take five times as long as the sum; and its
    fp32 sum over millions of elements is off by 1e-4.
    """
    room = torch.empty(min(SQUARED_PART, gradient.numel()), dtype=torch.float32)
    total = torch.zeros((), dtype=torch.float64)
    for part in gradient.reshape(-1).split(SQUARED_PART):
        widened = room[: part.numel()].copy_(part)
        total += torch.dot(widened, widened)
    return total


@squares_in_parts.register_fake
def _no_sum(gradient: Tensor) -> Tensor:
    return gradient.new_empty((), dtype=torch.float64)
