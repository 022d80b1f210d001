"""What a rank holds of the parameters: the weights the network reads, and the shards the optimizer updates.

The two differ where parameters are whole and only the optimizer's work is sharded (``zero=1|2``), and where the network
computes in a narrower dtype than the optimizer's. Then the optimizer updates master weights and the network reads a
working copy, cast once per step and not at every use by a micro-batch. Gradients accumulate in a parameter's
``grad_dtype``: as wide as its master weights, unless they never accumulate.
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
    """A parameter of a segment, and which part of the whole parameter it is."""

    name: str  # canonical; for a copied head, the embedding's name
    stage: int
    parameter: nn.Parameter
    part: TensorPart
    group: ParameterGroup
    copied: bool  # a head's own copy of a tied embedding: counted and saved only as the original
    states: torch.dtype | None = None  # dtype of the optimizer's copy; None: as it is
    placed_later: bool = False  # whether master weights are made later, when their device is known
    # Where the parameter lives off the device (``parallel/offload/params.py``): all of it, or this rank's rows. None:
    # on the device.
    home: Tensor | None = None
    home_file: WeightFile | None = None  # set if that tensor holds no values: the file that has them
    own_name: str | None = None  # its name in its module, if neither its name nor a copied head's

    @property
    def label(self) -> str:
        """The parameter's name, unique on its rank."""
        return self.own_name or (HEAD if self.copied else self.name)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates wider master weights, from which the parameter is then cast."""
        return self.states is not None and self.states != self.parameter.dtype


@dataclass(eq=False)
class Shard:
    """The part of one parameter that this rank's optimizer updates: elements ``start`` to ``stop`` of its box,
    row-major.
    """

    held: HeldParameter
    tensor: (
        nn.Parameter
    )  # the parameter or its master weights; after ``finish_step`` its gradient is the global batch's
    start: int
    stop: int
    counted: bool  # of several equal copies one counts: in the norm, and as the one saved
    working: Tensor | None = None  # if ``tensor`` is master weights: the working copy the network reads
    # Set if ``tensor`` is in host memory (``parallel/offload/states.py``): ``away`` is its gradient there, ``summed``
    # the gradient on the device until it leaves, ``squares`` the sum of its squares once it has left.
    away: OffloadedGradient | None = None
    summed: Tensor | None = None
    squares: Tensor | None = None
    # Set if the states of ``tensor``, which then has no values, are in files (``parallel/offload/state_files.py``).
    filed: StatesOnDisk | None = None

    @property
    def name(self) -> str:
        return self.held.name

    @property
    def box(self) -> Box:
        return self.held.part.box

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, not to vectors (norms and biases)."""
        return len(self.box.whole) >= 2

    @property
    def matrices(self) -> range:
        """The matrices of a stack that these elements touch, by index in the box; a single matrix is 0, a vector has
        none.
        """
        if len(self.box.whole) < 2 or self.start == self.stop:
            return range(0)
        size = math.prod(self.box.shape[-2:])
        return range(self.start // size, -(-self.stop // size))


class OffloadedGradient(Protocol):
    """The host's side of a piece's gradient."""

    times: int  # micro-batches of this step whose gradients have left
    early: bool  # whether they leave during the backward pass

    def arrived(self) -> Tensor | None: ...


class WeightFile(Protocol):
    """A parameter stored in a file. Reads and writes are asynchronous: still in flight on return."""

    stands: Tensor  # a tensor without values that has its shape and dtype

    def fetch(self, into: Tensor) -> FileTransfer: ...

    def send(self, values: Tensor) -> FileTransfer: ...

    def read(self) -> Tensor: ...

    def write(self, values: Tensor) -> None: ...

    def start_read(self, into: Tensor, after: Callable[[], None] | None) -> FileTransfer: ...

    def start_write(self, start: int, values: Tensor) -> FileTransfer: ...


class StatesOnDisk(Protocol):
    """A piece's optimizer states in files, one per state."""

    def begin(self, kind: str) -> Tensor:
        """Start a state as zeros; returns a tensor without values that stands for it."""

    def read(self, kind: str) -> Tensor: ...

    def write(self, kind: str, values: Tensor) -> None: ...

    def mapped(self, size: int) -> Tensor:
        """``size`` bytes of the same disk, memory-mapped."""


def hand(piece: Shard, gradient: Tensor) -> None:
    """Take the piece's gradient, which is on the device. It may have left already."""
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

    ``group_of`` overrides the layout's groups. ``states``: the dtype in which parameters outside FSDP are updated, and
    with ``masters`` also those inside; their device is decided later. ``homes``: host tensors of offloaded parameters;
    ``home_files``: files of parameters whose values are on disk.
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
    """For frozen parameters that are whole on every data rank: the elements this rank is responsible for."""
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
    """How gradients, and the weights updated from them, stay in sync across data ranks.

    ``last`` says that a stage's gradients will be complete after this backward pass.
    """

    pieces: list[Shard]

    def start_step(self) -> None: ...

    def before_backward(self, stage: int, last: bool) -> None: ...

    def after_backward(self, stage: int, last: bool) -> None: ...

    def finish_step(self) -> None:
        """Afterwards every piece's gradient is the sum over the data ranks."""

    def after_update(self) -> None:
        """Bring all ranks up to date: the pieces and this rank's working copies already have their new values."""

    def weights(self) -> list[tuple[str, Slice]]:
        """All parameters held here, as the network reads them."""

    def computed_with(self) -> list[nn.Parameter]:
        """The parameters that the network computes with and autograd writes gradients to, one for each held."""


class WholeParameters:
    """Parameters that no data rank shards: the optimizer updates all that is held."""

    def __init__(self, held: list[HeldParameter], mesh: Mesh) -> None:
        self.held = held
        self.pieces = [
            Shard(one, tensor, 0, one.parameter.numel(), counts(one, mesh), working)
            for one in held
            for tensor, working in [updated(one, one.parameter)]
        ]

    def move_gradients_to_masters(self) -> None:
        """Move gradients to the master weights."""
        for piece in self.pieces:
            if piece.working is not None and (found := piece.held.parameter.grad) is not None:
                hand(piece, found)

    def after_update(self) -> None: ...

    def weights(self) -> list[tuple[str, Slice]]:
        return whole_weights(self.held)

    def computed_with(self) -> list[nn.Parameter]:
        return [one.parameter for one in self.held]


def updated(held: HeldParameter, here: Tensor) -> tuple[nn.Parameter, Tensor | None]:
    """The tensor the optimizer updates, and the working copy that follows it. ``here``: this rank's values."""
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
    """Cast master weights into their working copies."""
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
    """One data rank: nothing to reduce."""

    def start_step(self) -> None:
        for piece in self.pieces:
            piece.tensor.grad = piece.held.parameter.grad = piece.summed = None

    def before_backward(self, stage: int, last: bool) -> None: ...

    def after_backward(self, stage: int, last: bool) -> None: ...

    def finish_step(self) -> None:
        self.move_gradients_to_masters()


class ComposedReducer:
    """Several parameter groups, each with its own reducer."""

    def __init__(self, held: list[HeldParameter], parts: list[tuple[list[HeldParameter], Reducer]]) -> None:
        """Merge the parts' pieces and parameters in the order of the network."""
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
    """The file that a piece's new weights belong in; None if there is none, or if data ranks shard the parameter and
    must all-gather it first.
    """
    group = piece.held.group
    return piece.held.home_file if group.fully_sharded or group.sharded.size == 1 else None


def whole_weights(held: Iterable[HeldParameter]) -> list[tuple[str, Slice]]:
    """Slices of parameters that are not sharded further."""
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
    """The slice of a parameter that is held here, or in a file of this rank."""
    if in_file is None:
        return Slice(values, whole, offset)
    return Slice(values, whole, offset, in_file.read, in_file.write)


def piece_slices(piece: Shard, values: Tensor) -> Iterator[Slice]:
    """View a tensor with one value per element of a piece as boxes of the whole parameter, to be filled."""
    flat = values.detach().view(-1)
    for (offset, shape), begin in piece_boxes(piece, 0, piece.stop - piece.start):
        yield Slice(flat[begin : begin + math.prod(shape)].view(shape), piece.box.whole, offset)


def piece_boxes(
    piece: Shard, start: int, stop: int
) -> Iterator[tuple[tuple[tuple[int, ...], tuple[int, ...]], int]]:
    """Elements of a piece as boxes (offset, shape) of the whole parameter, each with the index of its first element."""
    begin = start
    for offset, shape in range_boxes(piece.box.shape, piece.start + start, piece.start + stop):
        yield (tuple(a + b for a, b in zip(piece.box.offset, offset, strict=True)), shape), begin
        begin += math.prod(shape)


def in_blocks(piece: Shard) -> Shard:
    """The piece counted in blocks (``facts/blockwise.py``): one element per block."""
    block, box = block_length(piece.box.whole) or 1, piece.box
    whole, offset, shape = ((*one[:-1], one[-1] // block) for one in (box.whole, box.offset, box.shape))
    held = replace(piece.held, part=replace(piece.held.part, box=Box(whole, offset, shape)))
    return replace(piece, held=held, start=piece.start // block, stop=piece.stop // block)


def weight(piece: Shard) -> Tensor:
    """A piece's values; a copy if they are in a file."""
    return piece.tensor if piece.filed is None else piece.filed.read("weight")


@torch.no_grad()
def set_weight(piece: Shard, values: Tensor) -> None:
    """Set a piece's values. The working copy is updated later."""
    if piece.filed is None:
        piece.tensor.copy_(values)
    else:
        piece.filed.write("weight", values)


def gradient(piece: Shard) -> Tensor:
    """A piece's gradient; zeros if the parameter did not contribute to the loss."""
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
