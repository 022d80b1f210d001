"""A network placed on its ranks: what one rank holds of it, and how it works with the others in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models.initial import Fill, Slice, no_weights
from shoal.models.nf4 import PACKED
from shoal.parallel.compile import CompiledBlocks
from shoal.parallel.execute import Executor
from shoal.parallel.float8_scales import Float8Scales
from shoal.parallel.offload.direct_files import Files
from shoal.parallel.offload.host_memory import HostMemory, give_back_what_is_free
from shoal.parallel.offload.params import ParameterFetcher
from shoal.parallel.offload.states import OffloadedStates
from shoal.parallel.packed import fill_packed
from shoal.parallel.router_tally import RouterTally
from shoal.parallel.shard import FullyShard
from shoal.parallel.shards import Reducer, Shard, piece_slices, set_weight, write_working
from shoal.parallel.shared_gradients import SharedGradients
from shoal.parallel.stage_module import StageModule, local_tensor
from shoal.parallel.strict import StrictReducer
from shoal.parallel.zero import ShardedStates


@dataclass
class Placed:
    """This rank's part of a network, with storage and values, and all it needs to work with the other ranks."""

    segments: list[StageModule]
    weights: list[tuple[str, Slice]]  # every parameter held here, as the network reads it
    frozen: list[tuple[str, Slice]]  # those that are not trained
    still: list[Shard]  # frozen elements that this rank writes to checkpoints
    parts: list[Reducer]  # the reducers inside ``gradients``
    gradients: Reducer
    shared: SharedGradients
    executor: Executor
    routers: RouterTally
    exact: StrictReducer | None  # set in strict mode
    compiled: CompiledBlocks | None  # None: blocks run eager
    float8: Float8Scales | None  # None: matmuls run in the compute precision
    host: HostMemory  # where offloaded tensors live
    files: Files | None  # where tensors offloaded to NVMe live
    offloaded: OffloadedStates | None  # None: the device updates all of this rank's parameters
    fetched: ParameterFetcher | None  # None: all weights stay on the device
    # How many blocks ahead of the current one weights are read while an offloaded update still runs; None: the next
    # forward pass waits for the whole update.
    reads_ahead: int | None

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what the loss reports in addition to its value."""
        return self.segments[0].network.loss.measures

    def take_early(self, take: Callable[[Shard, Tensor], None]) -> None:
        """Hand over each gradient during the backward pass, as soon as it is complete.

        Gradients that are summed with other ranks' at the end of a step stay until then.
        """
        for part in self.parts:
            chosen = [piece for piece in part.pieces if not self.shared.sums(piece)]
            if isinstance(part, ShardedStates):
                part.take_early(take, chosen)
                continue
            sharded = part.parameters if isinstance(part, FullyShard) else {}
            for piece in chosen:
                parameter: Tensor = sharded.get(piece.held.label, piece.held.parameter)
                parameter.register_post_accumulate_grad_hook(_give(piece, take))

    def start_step(self, micro_batches: int) -> None:
        self.gradients.start_step()
        if self.offloaded is not None:
            self.offloaded.start_step(micro_batches)

    def finish_step(self, batch: int) -> None:
        """Give every piece the gradient of the global batch of ``batch`` sequences, on the device that updates it."""
        if self.fetched is not None:
            self.fetched.drop_all()
        self.gradients.finish_step()
        if self.exact is not None:
            self.exact.deliver(batch)
        self.shared.sum(self.gradients.pieces)
        if self.offloaded is not None:
            self.offloaded.leave_rest()

    def fill(self, give: Fill) -> None:
        """Initialise the pieces that this rank updates; all ranks' weights follow from them."""
        pieces = self.gradients.pieces
        together = [piece for piece in pieces if piece.away is None]
        give([(piece.name, part) for piece in together for part in piece_slices(piece, piece.tensor)])
        for piece in (piece for piece in pieces if piece.away is not None):
            # Computed on the device, as without offload: a host would take minutes instead of a second, and its
            # functions round differently.
            values = torch.empty_like(piece.tensor, device=self.host.device)
            give([(piece.name, part) for part in piece_slices(piece, values)])
            set_weight(piece, values)
            del values
            if piece.held.home_file is not None and self.host.device.type == "cpu":
                give_back_what_is_free()
        self.after_update()

    def fill_frozen(self, give: Fill) -> None:
        """Initialise the frozen weights. Checkpoints do not contain a base under adapters."""
        here = [one for one in self.frozen if one[1].write is None]
        fill_packed(here, give)
        if plain := [one for one in here if one[1].local.dtype != PACKED]:
            give(plain)
        for name, part in self.frozen:
            if part.write is None or give is no_weights:
                continue
            # One at a time, computed on the device, as for offloaded trained weights.
            values = torch.empty(part.local.shape, dtype=part.local.dtype, device=self.host.device)
            filled = part._replace(local=values, read=None, write=None)
            if values.dtype == PACKED:
                fill_packed([(name, filled)], give)
            else:
                give([(name, filled)])
            part.write(values)
            del values, filled
            if self.host.device.type == "cpu":
                give_back_what_is_free()

    def after_update(self, copied: bool = False, returned: bool = False) -> None:
        """Bring the weights that the network reads up to date with the pieces' new values, on all ranks.

        ``copied``: this rank's working copies are already up to date. ``returned``: the offloaded pieces' copies are,
        or will be.
        """
        pieces = self.gradients.pieces
        if self.fetched is not None:
            self.fetched.drop_all()
        write_working(piece for piece in pieces if not (copied if piece.away is None else returned))
        self.gradients.after_update()
        if self.float8 is not None:
            self.float8.refresh()


def _give(piece: Shard, take: Callable[[Shard, Tensor], None]) -> Callable[[Tensor], None]:
    def give(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        take(piece, local_tensor(gradient))
        parameter.grad = None

    return give
