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
    targets: Tensor | None  # None: no loss is asked for
    noise: Tensor | None
    reference: Tensor | None = None  # float64 [rows], of a loss that compares with the first weights


class StageModule(nn.Module):
    """Some consecutive blocks; in the first segment after the embedding, in the last before the norm and the head."""

    def __init__(self, network: Network, stage: Stage, own_head: bool) -> None:
        """``own_head``: a tied head gets a copy of the embedding, whose gradients are then summed apart."""
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
        """Tokens or hidden states in; out come hidden states or, at the end, the sums of the loss.

        With ``place`` the end gives the scores of the token after that place.
        """
        hidden: Tensor = self.network(inputs, batch.positions, batch.documents, batch.noise)
        if not self.stage.last:
            return hidden
        if place is not None:
            return self.network.lm_head.scores(hidden, place)
        return self.network.loss(self.network.lm_head, hidden, batch)


def materialize(segment: StageModule, device: torch.device, empty: Collection[str] = ()) -> None:
    """Storage for the parameters of a segment on the meta device; their values are still to come.

    ``empty``: names of those that give it up again at once.

    Not torch's ``to_empty`` where it can be helped: it puts the new tensor in the old one's place, which tensors
    without data, as a dry run's are, do not allow. FSDP needs it, for it refers to its parameters.
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
    # Whenever another module of a unit gets storage, FSDP copies what it has to pad there.
    for parameter in uneven:
        empty_storage(parameter)


def _padded(parameter: Tensor) -> bool:
    """Whether FSDP's ranks have unequal parts of a parameter, of which it pads the smaller ones."""
    if not isinstance(parameter, DTensor):
        return False
    dimension = cast(Shard, parameter.placements[-1]).dim
    return parameter.shape[dimension] % parameter.device_mesh.size(-1) != 0


def local_tensor(tensor: Tensor) -> Tensor:
    """All of a parameter or a gradient, or this rank's rows."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def empty_storage(parameter: Tensor) -> None:
    """A parameter's bytes go; its shape and all views of it stay."""
    local_tensor(parameter).untyped_storage().resize_(0)


def fill_storage(parameter: Tensor) -> None:
    """Room for a parameter that has none. What it holds is anything."""
    rows = local_tensor(parameter)
    rows.untyped_storage().resize_((int(rows.storage_offset()) + rows.numel()) * rows.element_size())


class _EndOfBackward(torch.autograd.Function):
    """What comes in has no gradient, what goes out has one, which ends here and is not kept."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def with_gradient(output: Tensor) -> Tensor:
    """What a backward pass can begin at, even where nothing before it is trained."""
    if not torch.is_grad_enabled() or output.requires_grad:
        return output
    passed: Tensor = _EndOfBackward.apply(output, torch.empty(0, requires_grad=True))
    return passed


def before_backward(module: nn.Module, do: Callable[[], None]) -> None:
    """Whenever the gradient of what this module gives is about to go into it."""

    def hook(_: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: do())

    module.register_forward_hook(hook)


def split_stages(network: Network, stages: list[Stage], own_head: bool) -> list[StageModule]:
    """One segment for each of these stages, out of a network on the meta device."""
    # The copies share nothing, and on the meta device they hold nothing.
    networks = [network, *(copy.deepcopy(network) for _ in stages[1:])]
    return [StageModule(part, stage, own_head) for part, stage in zip(networks, stages, strict=True)]
