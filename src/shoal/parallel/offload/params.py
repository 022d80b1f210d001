"""Offload of parameters: weights live in host memory or in files, and are on the device only while they are used.

A block's weights are fetched while the previous block computes, in the forward pass and again, in reverse order, in the
backward pass. So the device holds the weights of two blocks, and those of the network's two ends when their turn comes.
A fetch fills the parameter's own storage, which is freed after use: autograd saved a view of the weight, which sees the
values again. The weights themselves belong to the host (``parallel/offload/states.py``), which updates them, so nothing
has to be copied back.

Where FSDP all-gathers (``zero=3``), it asks each rank's rows how to send them, ahead of use as always. Rows in host
memory are copied when asked for; rows in files have been read ahead by ``rows_ahead.py``. FSDP's own
``CPUOffloadPolicy`` could do that too, but it would control how gradients leave: through pinned memory of twice their
size, accumulated while the device waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.facts.layout.offload import offloaded
from shoal.facts.model.parameters import CORRECTION, block_of
from shoal.parallel.offload.direct_files import FileTransfer
from shoal.parallel.offload.host_memory import HostMemory
from shoal.parallel.offload.rows_ahead import RowsAhead, UnitOfRows
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.offload.weight_files import FiledWeight
from shoal.parallel.shards import HeldParameter, WeightFile
from shoal.parallel.stage_module import (
    StageModule,
    before_backward,
    empty_storage,
    fill_storage,
    local_tensor,
)


def resting_names(segments: Sequence[StageModule], fraction: float) -> frozenset[str]:
    """Names of a rank's parameters, on any device, that live in host memory."""
    named = [one for segment in segments for one in segment.network.named_parameters()]
    first = offloaded([local_tensor(parameter).numel() for _, parameter in named], fraction)
    # Routers' bias corrections are tiny and not updated by the optimizer.
    return frozenset(name for name, _ in named[first:] if not name.endswith(CORRECTION))


class HostStorage(NamedTuple):
    """Where offloaded parameters live."""

    tensors: dict[nn.Parameter, Tensor]
    files: dict[nn.Parameter, FiledWeight]  # files of those whose host tensor has no values


def allocate_host_storage(
    segments: Sequence[StageModule], names: frozenset[str], memory: HostMemory, staged: StagedFiles | None
) -> HostStorage:
    """Make homes for the named parameters. Those outside FSDP have freed their storage already."""
    homes = HostStorage({}, {})
    for segment in segments:
        for name, parameter in segment.network.named_parameters():
            if name in names:
                rows = local_tensor(parameter)
                if staged is None:
                    room = memory.take(rows.numel() * rows.element_size()).bytes
                    homes.tensors[parameter] = room.view(rows.dtype).view(rows.shape)
                else:
                    made = FiledWeight(len(homes.files), rows, staged)
                    homes.tensors[parameter], homes.files[parameter] = made.stands, made
    return homes


class GatheredFromHome:
    """How FSDP all-gathers one parameter whose local rows are offloaded."""

    ahead: RowsAhead | None = None  # prefetches rows from files

    def __init__(self, rows: Tensor, padded: torch.Size, held: HeldParameter) -> None:
        """``rows``: FSDP's local rows, whose storage is freed. ``padded``: their shape when sent."""
        assert held.home is not None
        self.label, self.padded, self.device = held.label, padded, rows.device
        self.home, self.file = held.home, held.home_file
        told: Any = rows
        told.fsdp_pre_all_gather, told.fsdp_post_all_gather = self.before, self.after
        empty_storage(rows)

    def before(
        self, mesh: object, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        """What to send. FSDP asks on the stream that will read it."""
        sent = torch.empty(self.padded, dtype=self.home.dtype, device=self.device)
        rows = sent[: self.home.shape[0]]
        if self.file is None:
            rows.copy_(self.home, non_blocking=True)
        elif self.ahead is None:
            self.file.fetch(rows).result()
        else:
            self.ahead.give(self.file, rows)
        return (sent,), None

    def after(
        self, came: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> None:
        """Nothing to do: what arrives is already where FSDP's parameter expects it."""
        assert out is not None


class UnitFromHome(NamedTuple):
    """The offloaded part of what FSDP gathers at once."""

    rows: list[GatheredFromHome]  # in the order that FSDP asks for them
    again: bool  # gathered in the backward pass too


def read_ahead(units: Sequence[UnitFromHome], staged: StagedFiles) -> RowsAhead:
    """Prefetch rows of blocks from files before FSDP asks for them. ``units``: in forward order."""
    filed: list[UnitOfRows] = []
    within: set[int | None] = set()  # the blocks of the last unit
    resting: list[GatheredFromHome] = []
    for unit in units:
        rows = [one for one in unit.rows if one.file is not None and block_of(one.label) is not None]
        files = [one.file for one in rows if one.file is not None]
        again = files if unit.again else []
        blocks = {block_of(one.label) for one in rows}
        if filed and blocks <= within:  # experts, which FSDP gathers with the rest of their blocks
            filed[-1] = UnitOfRows([*filed[-1].files, *files], [*filed[-1].again, *again])
        else:
            filed.append(UnitOfRows(files, again))
            within = blocks
        resting += rows
    ahead = RowsAhead(filed, staged)
    for one in resting:
        one.ahead = ahead
    return ahead


Fetched = Mapping[nn.Parameter, Tensor]  # parameters that are used together, each with its host tensor
NOTHING: Fetched = {}


class ParameterFetcher:
    """The weights of a rank that are on the device: those in use, and those needed next."""

    def __init__(self, segments: Sequence[StageModule], homes: HostStorage, device: torch.device) -> None:
        """Make these parameters present whenever the network uses them."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Each with the event that ends its copy.
        self._here: dict[nn.Parameter, torch.cuda.Event | FileTransfer | None] = {}
        self.homes = {one: home for one, home in homes.tensors.items() if not isinstance(one, DTensor)}
        self._files: Mapping[nn.Parameter, WeightFile] = homes.files
        for segment in segments:
            self._watch(segment)

    def _watch(self, segment: StageModule) -> None:
        decoder, head = segment.network.model, segment.network.lm_head

        def of(*modules: nn.Module | None) -> Fetched:
            found = (one for module in modules if module is not None for one in module.parameters())
            return {parameter: self.homes[parameter] for parameter in found if parameter in self.homes}

        blocks = list(decoder.layers.values())
        units = [of(block) for block in blocks]
        tied = head.tied if segment.stage.last else ()
        ends = of(decoder.norm, head, *tied) if segment.stage.last else NOTHING
        if decoder.embed_tokens is not None:
            entering = of(decoder.embed_tokens, decoder.embed_positions)
            _before(decoder.embed_tokens, partial(self.use, entering, units[0], NOTHING))
        if decoder.norm is not None:
            _before(decoder.norm, partial(self.use, ends, NOTHING, units[-1]))
        for number, (block, unit) in enumerate(zip(blocks, units, strict=True)):
            following = units[number + 1] if number + 1 < len(units) else ends
            _before(block, partial(self.use, unit, following, NOTHING))
            earlier = units[number - 1] if number else NOTHING
            before_backward(block, partial(self.use, unit, earlier, NOTHING))

    def use(self, unit: Fetched, following: Fetched, in_training: Fetched) -> None:
        """Fetch ``unit`` now and prefetch ``following``; also ``in_training`` if a backward pass comes."""
        soon = dict(following)
        if torch.is_grad_enabled():
            soon.update(in_training)
        self._drop(one for one in list(self._here) if one not in unit and one not in soon)
        self._fetch(unit)
        for parameter in unit:
            self._wait_for(self._here[parameter])
        self._fetch(soon)

    def drop_all(self) -> None:
        """Free all weights: none is in use, or all are stale."""
        self._drop(list(self._here))

    def _drop(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            # A prefetched weight may still be in flight into memory that is about to be reused.
            self._wait_for(self._here.pop(parameter))
            empty_storage(parameter)

    def _fetch(self, unit: Fetched) -> None:
        missing = [parameter for parameter in unit if parameter not in self._here]
        if not missing:
            return
        for parameter in missing:
            fill_storage(parameter)
        arrived = None
        # Through ``data``: autograd must see the same weight that it saved, and it is.
        if self._files:
            self._here.update({one: self._files[one].fetch(one.data) for one in missing})
            return
        if (stream := self._stream) is None:
            for parameter in missing:
                parameter.data.copy_(unit[parameter])
        else:
            # Kernels issued so far may still read whatever used this memory before.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for parameter in missing:
                    parameter.data.copy_(unit[parameter], non_blocking=True)
            arrived = stream.record_event()
        self._here.update(dict.fromkeys(missing, arrived))

    def _wait_for(self, arrived: torch.cuda.Event | FileTransfer | None) -> None:
        if isinstance(arrived, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(arrived)
        elif arrived is not None:
            arrived.result()


def _before(module: nn.Module, use: partial[None]) -> None:
    def hook(*_: Any) -> None:
        use()

    module.register_forward_pre_hook(hook, prepend=True)
