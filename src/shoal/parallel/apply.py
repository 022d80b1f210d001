"""A network, placed: one function, top to bottom, that applies a layout's strategies from outside the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.facts.config import TuneSection
from shoal.models.decoder import Network
from shoal.parallel.mesh import Mesh
from shoal.parallel.replicate import Replicate


@dataclass
class Placed:
    """A network whose parameters are on their device, and what keeps its gradients in step with other ranks'."""

    network: Network
    replicate: Replicate | None


def apply(
    network: Network,
    mesh: Mesh,
    tune: TuneSection,
    initialise: Callable[[Network], None],
    reduce_dtype: torch.dtype | None = None,
) -> Placed:
    """Place a network that was built on the meta device, give its parameters storage and initial values.

    ``initialise`` runs once storage exists, on this rank's part only, so no rank ever holds more than its part.
    ``reduce_dtype`` is the type gradients travel in, None for their own.
    """
    network.to_empty(device=mesh.device)
    initialise(network)

    replicate = None
    if mesh.replicas is not None:
        replicate = Replicate(network, mesh.replicas, round(tune.bucket_mb * 2**20), reduce_dtype)
    return Placed(network, replicate)
