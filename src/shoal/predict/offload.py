"""What waits off the device (``offload``): optimizer states, weights, activations, in the host's memory or on disk."""

from __future__ import annotations

from typing import NamedTuple

from shoal.predict.question import Question
from shoal.predict.states import Resting


class Waiting(NamedTuple):
    """Bytes of one rank that rest elsewhere."""

    params: float
    optimizer: float
    share_of_params: float
    share_of_optimizer: float
    share_of_activations: float
    activations_on_nvme: bool
    host: float
    nvme: float


NOWHERE = Waiting(0.0, 0.0, 0.0, 0.0, 0.0, False, 0.0, 0.0)


def waiting(question: Question, states: Resting) -> Waiting:
    """An update in the host's memory also needs the gradients there."""
    if not question.layout.offload:
        return NOWHERE
    shares = {part.what: (part.fraction, part.nvme) for part in question.layout.offload}
    params, params_on_nvme = shares.get("params", (0.0, False))
    optimizer, optimizer_on_nvme = shares.get("optimizer", (0.0, False))
    activations, activations_on_nvme = shares.get("activations", (0.0, False))
    moved = {False: 0.0, True: 0.0}
    moved[params_on_nvme] += params * states.params
    moved[optimizer_on_nvme] += optimizer * states.optimizer
    moved[False] += optimizer * states.grads
    return Waiting(
        params * states.params,
        optimizer * states.optimizer,
        params,
        optimizer,
        activations,
        activations_on_nvme,
        moved[False],
        moved[True],
    )
