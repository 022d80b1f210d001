"""What a rank holds of the parameters: the weights that the network reads, and shards that the optimizer updates.

They differ where parameters are whole and only the optimizer's work is shared out (``zero=1|2``), and where the network
computes in a narrower precision than the run keeps its state in. Then the optimizer updates a master copy, and the
network reads a working copy: it is cast once a step, not wherever a micro-batch uses it. Gradients add up in a
parameter's ``grad_dtype``: as wide as its master copy, unless nothing is ever added to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.facts.blockwise import block_length
from shoal.facts.layout.parameter_groups import ParameterGroup, expert_ranks, group_name, parameter_groups
from shoal.facts.model import Model
from shoal.facts.model.parameters import EMBEDDING, HEAD, Parameter, by_name
from shoal.facts.model.tensor_split import Box, TensorPart, range_boxes, tensor_part
from shoal.models.initial import Slice
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import FileTransfer
from shoal.parallel.stage_module import StageModule

GroupOf = Callable[[Parameter], ParameterGroup]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of a segment and what part of the whole one it is."""

    name: str  # canonical; of a copied head, that of the embedding it is a copy of
    stage: int
    parameter: nn.Parameter
    part: TensorPart
    group: ParameterGroup
    copied: bool  # a head's own copy of a tied embedding: counted and written where it is a copy of
    states: torch.dtype | None = None  # what the optimizer keeps it in; None: as it is
    placed_later: bool = False  # whether a master copy is made when it is known where it will be
    # Where it rests off the device (``parallel/offload/params.py``): all of it, or this rank's rows. None: here.
    home: Tensor | None = None
    home_file: WeightFile | None = (
        None  # where that tensor has no values: those of all of it are in this file
    )
    own_name: str | None = (
        None  # what its module calls it, where that is neither its name nor a copied head's
    )

    @property
    def label(self) -> str:
        """The name of this parameter among those of its rank."""
        return self.own_name or (HEAD if self.copied else self.name)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a wider copy, which the parameter then follows."""
        return self.states is not None and self.states != self.parameter.dtype


@dataclass(eq=False)
class Shard:
    """What one rank's optimizer updates of one parameter: elements ``start`` to ``stop`` of its box, row by row."""

    held: HeldParameter
    tensor: (
        nn.Parameter
    )  # the parameter, or a master copy. Its gradient is, after ``finish_step``, the global batch's
    start: int
    stop: int
    counted: bool  # of several equal pieces one counts: in the norm, and as the one that is written
    working: Tensor | None = None  # where ``tensor`` is a master copy: its values as the network reads them
    # Where ``tensor`` is the host's (``parallel/offload/states.py``): what waits there; until it leaves, the gradient
    # on the device; of one that has left, the sum of its squares.
    away: AwayGradient | None = None
    summed: Tensor | None = None
    squares: Tensor | None = None
    # Where the states of ``tensor``, which then has no values, rest in files (``parallel/offload/state_files.py``).
    filed: FiledStates | None = None

    @property
    def name(self) -> str:
        return self.held.name

    @property
    def box(self) -> Box:
        return self.held.part.box

    @property
    def decayed(self) -> bool:
        """Weight decay applies to matrices; norms and biases, the vectors, carry none."""
        return len(self.box.whole) >= 2

    @property
    def matrices(self) -> range:
        """Of a stack of matrices those that some of these elements are of, by their numbers in the box; of a matrix
        itself: 0; of a vector none."""
        if len(self.box.whole) < 2 or self.start == self.stop:
            return range(0)
        size = math.prod(self.box.shape[-2:])
        return range(self.start // size, -(-self.stop // size))


class AwayGradient(Protocol):
    """What the host has of a piece."""

    times: int  # micro-batches whose gradients have left, in this step
    early: bool  # whether they leave in the backward pass

    def arrived(self) -> Tensor | None: ...


class WeightFile(Protocol):
    """Where a parameter rests that is in a file. What goes there, or comes from there, is under way on return."""

    stands: Tensor  # for it: its shape and its type

    def fetch(self, into: Tensor) -> FileTransfer: ...

    def send(self, values: Tensor) -> FileTransfer: ...

    def read(self) -> Tensor: ...

    def write(self, values: Tensor) -> None: ...

    def start_read(self, into: Tensor, after: Callable[[], None] | None) -> FileTransfer: ...

    def start_write(self, start: int, values: Tensor) -> FileTransfer: ...


class FiledStates(Protocol):
    """What files have of a piece, state by state."""

    def begin(self, kind: str) -> Tensor:
        """Zeros; a tensor without values that stands for them."""

    def read(self, kind: str) -> Tensor: ...

    def write(self, kind: str, values: Tensor) -> None: ...

    def mapped(self, size: int) -> Tensor:
        """So many bytes of the same disk, used as memory is."""


def hand(piece: Shard, gradient: Tensor) -> None:
    """The gradient of a piece, on the device. It may have left already."""
    if piece.away is None:
        piece.tensor.grad = gradient
    elif not piece.away.times:
        piece.summed = gradient


def held_parameters(
    segments: Iterable[StageModule],
    model: Model,
    mesh: Mesh,
    group_of: GroupOf | None = None,
    states: torch.dtype | None = None,
    masters: bool = False,
    homes: Mapping[nn.Parameter, Tensor] | None = None,
    home_files: Mapping[nn.Parameter, WeightFile] | None = None,
) -> list[HeldParameter]:
    """Every parameter of the segments on this rank, in forward order.

    ``group_of``: other groups than the layout's. ``states``: what those that FSDP does not hold are updated in, and
    with ``masters`` those that it holds as well; where they will be is decided later. ``homes``: of those that rest off
    the device; ``home_files``: of those whose values are in files.
    """
    canonical, groups = (
        by_name(model),
        parameter_groups(mesh.layout, model.experts is not None, lora=model.adapters is not None),
    )
    tp, index, ep = mesh.layout.tp, mesh.coords["tp"], expert_ranks(mesh.layout)

    def held(name: str, stage: int, parameter: nn.Parameter, copied: bool) -> HeldParameter:
        whole = canonical[name]
        group = groups[group_name(whole)] if group_of is None else group_of(whole)
        part = tensor_part(whole, tp, index, ep.size, mesh.index_in(ep))
        rest = None if isinstance(parameter, DTensor) and not masters else states
        home = None if homes is None else homes.get(parameter)
        in_file = None if home_files is None else home_files.get(parameter)
        return HeldParameter(name, stage, parameter, part, group, copied, rest, masters, home, in_file)

    return [
        held(name, segment.stage.index, parameter, copied)
        for segment in segments
        for name, parameter, copied in _named(segment)
    ]


def _named(segment: StageModule) -> Iterator[tuple[str, nn.Parameter, bool]]:
    for name, parameter in segment.network.named_parameters():
        copied = name == HEAD and segment.copied_head
        yield EMBEDDING if copied else name, parameter, copied


def unsharded_pieces(held: Iterable[HeldParameter], mesh: Mesh) -> list[Shard]:
    """Of parameters that are whole on every data rank, and frozen: the elements that this rank answers for."""
    found = []
    for one in held:
        ranks, index = one.group.sharded.size, mesh.index_in(one.group.sharded)
        size = one.parameter.numel()
        start, stop = size * index // ranks, size * (index + 1) // ranks
        if start < stop:
            mine = nn.Parameter(one.parameter.detach().view(-1)[start:stop], requires_grad=False)
            found.append(Shard(one, mine, start, stop, counts(one, mesh)))
    return found


def gradient_bytes(parameter: Tensor) -> int:
    return parameter.numel() * (parameter.grad_dtype or parameter.dtype).itemsize


def counts(held: HeldParameter, mesh: Mesh) -> bool:
    """Whether this rank's copy of a part is the one that counts."""
    return held.part.copy == 0 and not held.copied and mesh.index_in(held.group.replicated) == 0


class Reducer(Protocol):
    """A way to keep gradients, and what is made of them, in step with the other data ranks.

    ``last`` says that a stage's gradients will be complete after this backward pass.
    """

    pieces: list[Shard]

    def start_step(self) -> None: ...

    def before_backward(self, stage: int, last: bool) -> None: ...

    def after_backward(self, stage: int, last: bool) -> None: ...

    def finish_step(self) -> None:
        """Every piece's gradient is the sum over the data ranks."""

    def after_update(self) -> None:
        """The pieces have new values, and so have this rank's working copies of them: make all ranks follow."""

    def weights(self) -> list[tuple[str, Slice]]:
        """All parameters that are held here, as the network reads them."""

    def computed_with(self) -> list[nn.Parameter]:
        """The parameters that the network computes with, and autograd gives gradients to, one for each held."""


class WholeParameters:
    """Parameters that no data rank shares out: the optimizer updates all that is held."""

    def __init__(self, held: list[HeldParameter], mesh: Mesh) -> None:
        self.held = held
        self.pieces = [
            Shard(one, tensor, 0, one.parameter.numel(), counts(one, mesh), working)
            for one in held
            for tensor, working in [updated(one, one.parameter)]
        ]

    def hand_gradients(self) -> None:
        """To the master copies."""
        for piece in self.pieces:
            if piece.working is not None and (found := piece.held.parameter.grad) is not None:
                hand(piece, found)

    def after_update(self) -> None: ...

    def weights(self) -> list[tuple[str, Slice]]:
        return whole_weights(self.held)

    def computed_with(self) -> list[nn.Parameter]:
        return [one.parameter for one in self.held]


def updated(held: HeldParameter, here: Tensor) -> tuple[nn.Parameter, Tensor | None]:
    """What the optimizer updates, and what has to follow it. ``here``: the values that this rank holds."""
    if held.home is not None:
        return nn.Parameter(torch.empty_like(here, dtype=held.states, device="meta")), held.home
    if not held.has_master:
        return here if isinstance(here, nn.Parameter) else nn.Parameter(here), None
    device = "meta" if held.placed_later else here.device
    master = nn.Parameter(torch.empty_like(here, dtype=held.states, device=device))
    if not isinstance(held.parameter, DTensor):
        master.grad_dtype = held.parameter.grad_dtype
    return master, here.detach()


@torch.no_grad()
def write_working(pieces: Iterable[Shard]) -> None:
    """Give the working copies the values of what they are copies of."""
    copied = [piece for piece in pieces if piece.working is not None]
    masters = [piece for piece in copied if piece.away is None]
    for piece in copied:
        if piece.away is None or piece.working is None:
            continue
        if piece.held.home_file is None:
            piece.working.copy_(weight(piece).detach())
        elif (rests := goes_home(piece)) is not None:
            rests.send(weight(piece).detach()).result()
    if masters:
        working: list[Any] = [piece.working for piece in masters]
        torch._foreach_copy_(working, [piece.tensor.detach() for piece in masters])


class NoReducer(WholeParameters):
    """One data rank: gradients are what they are."""

    def start_step(self) -> None:
        for piece in self.pieces:
            piece.tensor.grad = piece.held.parameter.grad = piece.summed = None

    def before_backward(self, stage: int, last: bool) -> None: ...

    def after_backward(self, stage: int, last: bool) -> None: ...

    def finish_step(self) -> None:
        self.hand_gradients()


class ComposedReducer:
    """Several groups of parameters, each with a way of its own."""

    def __init__(self, held: list[HeldParameter], parts: list[tuple[list[HeldParameter], Reducer]]) -> None:
        """Pieces and parameters are those of the parts, together in the order of the network."""
        self.held, self.parts = held, [part for _, part in parts]
        self._held_by = parts
        order = {one.label: number for number, one in enumerate(held)}
        pieces = [piece for part in self.parts for piece in part.pieces]
        self.pieces = sorted(pieces, key=lambda piece: order[piece.held.label])

    def start_step(self) -> None:
        for part in self.parts:
            part.start_step()

    def before_backward(self, stage: int, last: bool) -> None:
        for part in self.parts:
            part.before_backward(stage, last)

    def after_backward(self, stage: int, last: bool) -> None:
        for part in self.parts:
            part.after_backward(stage, last)

    def finish_step(self) -> None:
        for part in self.parts:
            part.finish_step()

    def after_update(self) -> None:
        for part in self.parts:
            part.after_update()

    def weights(self) -> list[tuple[str, Slice]]:
        return [one for part in self.parts for one in part.weights()]

    def computed_with(self) -> list[nn.Parameter]:
        found = {
            one.label: parameter
            for held, part in self._held_by
            for one, parameter in zip(held, part.computed_with(), strict=True)
        }
        return [found[one.label] for one in self.held]


def goes_home(piece: Shard) -> WeightFile | None:
    """The file that a piece's new weights belong in; None where there is none, or where data ranks that share a
    parameter out have to gather each other's first."""
    group = piece.held.group
    return piece.held.home_file if group.fully_sharded or group.sharded.size == 1 else None


def whole_weights(held: Iterable[HeldParameter]) -> list[tuple[str, Slice]]:
    """Parameters that are not sharded further."""
    return [
        (
            one.name,
            slice_of(
                one.parameter.data if one.home is None else one.home,
                one.part.box.whole,
                one.part.box.offset,
                one.home_file,
            ),
        )
        for one in held
    ]


def slice_of(
    values: Tensor, whole: tuple[int, ...], offset: tuple[int, ...], in_file: WeightFile | None
) -> Slice:
    """Of a parameter, what rests here, or in a file of this rank's."""
    if in_file is None:
        return Slice(values, whole, offset)
    return Slice(values, whole, offset, in_file.read, in_file.write)


def piece_slices(piece: Shard, values: Tensor) -> Iterator[Slice]:
    """A tensor that has a value for each element of a piece, as boxes of the whole parameter: to be filled."""
    flat = values.detach().view(-1)
    for (offset, shape), begin in piece_boxes(piece, 0, piece.stop - piece.start):
        yield Slice(flat[begin : begin + math.prod(shape)].view(shape), piece.box.whole, offset)


def piece_boxes(
    piece: Shard, start: int, stop: int
) -> Iterator[tuple[tuple[tuple[int, ...], tuple[int, ...]], int]]:
    """Elements of a piece as boxes (offset, shape) of the whole parameter, each with its first element's number."""
    begin = start
    for offset, shape in range_boxes(piece.box.shape, piece.start + start, piece.start + stop):
        yield (tuple(a + b for a, b in zip(piece.box.offset, offset, strict=True)), shape), begin
        begin += math.prod(shape)


def in_blocks(piece: Shard) -> Shard:
    """A piece as its blocks (``facts/blockwise.py``): one element for each, of a parameter that has one for each."""
    block, box = block_length(piece.box.whole) or 1, piece.box
    whole, offset, shape = ((*one[:-1], one[-1] // block) for one in (box.whole, box.offset, box.shape))
    held = replace(piece.held, part=replace(piece.held.part, box=Box(whole, offset, shape)))
    return replace(piece, held=held, start=piece.start // block, stop=piece.stop // block)


def weight(piece: Shard) -> Tensor:
    """A piece's values; a copy, where they are in a file."""
    return piece.tensor if piece.filed is None else piece.filed.read("weight")


@torch.no_grad()
def set_weight(piece: Shard, values: Tensor) -> None:
    """New values of a piece. What the network reads follows later."""
    if piece.filed is None:
        piece.tensor.copy_(values)
    else:
        piece.filed.write("weight", values)


def gradient(piece: Shard) -> Tensor:
    """A piece's gradient; zeros where nothing it takes part in has reached the loss."""
    if piece.summed is not None:
        return piece.summed
    if piece.away is not None:
        arrived = piece.away.arrived()
        if arrived is None:
            assert piece.working is not None
            arrived = piece.summed = torch.zeros_like(piece.working, dtype=piece.tensor.dtype)
        return arrived
    if piece.tensor.grad is None:
        piece.tensor.grad = torch.zeros_like(piece.tensor, dtype=piece.tensor.grad_dtype)
    return piece.tensor.grad
