"""The part of the network that one pipeline stage holds; without a pipeline, all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shoal.facts.layout.stages import Stage
from shoal.models.decoder import Network
from shoal.models.documents import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the network together."""

    tokens: Tensor  # int64 [rows, seq]
    positions: Tensor
    documents: Documents | None
    targets: Tensor | None  # None: no loss is needed
    noise: Tensor | None
    reference: Tensor | None = None  # float64 [rows], for a loss that compares with the initial weights


class StageModule(nn.Module):
    """Some consecutive blocks, plus the embedding in the first segment and the norm and head in the last."""

    def __init__(self, network: Network, stage: Stage, own_head: bool) -> None:
        """``own_head``: a tied head gets its own copy of the embedding, whose gradients are then summed separately."""
        super().__init__()
        self.network = network
        self.stage = stage
        self.copied_head = own_head and stage.last and network.shape.tied
        if self.copied_head:
            tied = network.lm_head.matrix()
            network.lm_head.weight = nn.Parameter(torch.empty_like(tied), tied.requires_grad)
            network.lm_head.tied = ()
        decoder = network.model
        for name in list(decoder.layers):
            if int(name) not in stage.layers:
                del decoder.layers[name]
        absent: list[tuple[nn.Module, str]]
        absent = [] if stage.first else [(decoder, "embed_tokens"), (decoder, "embed_positions")]
        absent += [] if stage.last else [(decoder, "norm"), (network, "lm_head")]
        for owner, child in absent:
            setattr(owner, child, None)

    def forward(self, inputs: Tensor, batch: MicroBatch, place: int | None = None) -> Tensor:
        """Takes tokens or hidden states; returns hidden states or, in the last segment, the sums of the loss.

        With ``place`` the last segment returns the logits for the token after that position.
        """
        hidden: Tensor = self.network(inputs, batch.positions, batch.documents, batch.noise)
        if not self.stage.last:
            return hidden
        if place is not None:
            return self.network.lm_head.scores(hidden, place)
        return self.network.loss(self.network.lm_head, hidden, batch)


def materialize(segment: StageModule, device: torch.device, empty: Collection[str] = ()) -> None:
    """Allocate storage for the parameters of a meta-device segment; their values come later.

    ``empty``: names of parameters that free it again at once.

    Avoids torch's ``to_empty`` where possible: it swaps in a new tensor, which tensors without data, as in a dry run,
    do not allow. FSDP needs it, because it keeps references to its parameters.
    """
    uneven: list[nn.Parameter] = []
    for path, module in segment.network.named_modules():
        own = list(module.named_parameters(recurse=False))
        if any(isinstance(parameter, DTensor) for _, parameter in own):
            module.to_empty(device=device, recurse=False)
        else:
            for name, parameter in own:
                made = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(made, parameter.requires_grad))
        for name, parameter in module.named_parameters(recurse=False):
            if f"{path}.{name}" not in empty:
                continue
            if _padded(parameter):
                uneven.append(parameter)
            else:
                empty_storage(parameter)
    # Whenever another module of a unit gets storage, FSDP copies whatever it has to pad there.
    for parameter in uneven:
        empty_storage(parameter)


def _padded(parameter: Tensor) -> bool:
    """Whether FSDP's ranks have unequal shards of a parameter, so that it pads the smaller ones."""
    if not isinstance(parameter, DTensor):
        return False
    dimension = cast(Shard, parameter.placements[-1]).dim
    return parameter.shape[dimension] % parameter.device_mesh.size(-1) != 0


def local_tensor(tensor: Tensor) -> Tensor:
    """A whole parameter or gradient, or this rank's rows of it."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def empty_storage(parameter: Tensor) -> None:
    """Free a parameter's storage; its shape and all views of it remain."""
    local_tensor(parameter).untyped_storage().resize_(0)


def fill_storage(parameter: Tensor) -> None:
    """Allocate storage for a parameter that has none, uninitialised."""
    rows = local_tensor(parameter)
    rows.untyped_storage().resize_((int(rows.storage_offset()) + rows.numel()) * rows.element_size())


class _EndOfBackward(torch.autograd.Function):
    """Identity that gives its output a gradient, which ends here and is not kept."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def with_gradient(output: Tensor) -> Tensor:
    """Make a backward pass possible from here, even if nothing before it is trained."""
    if not torch.is_grad_enabled() or output.requires_grad:
        return output
    passed: Tensor = _EndOfBackward.apply(output, torch.empty(0, requires_grad=True))
    return passed


def before_backward(module: nn.Module, do: Callable[[], None]) -> None:
    """Call ``do`` whenever the gradient of this module's output is about to enter it."""

    def hook(_: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: do())

    module.register_forward_hook(hook)


def split_stages(network: Network, stages: list[Stage], own_head: bool) -> list[StageModule]:
    """Split a meta-device network into one segment per stage."""
    # The copies share nothing, and on the meta device they take no memory.
    networks = [network, *(copy.deepcopy(network) for _ in stages[1:])]
    return [StageModule(part, stage, own_head) for part, stage in zip(networks, stages, strict=True)]
