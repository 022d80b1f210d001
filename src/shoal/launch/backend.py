"""What carries tensors between ranks: NCCL, gloo, or in SageMaker's containers its own collectives (SMDDP)."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from shoal.facts.problem import BadInput
from shoal.plan.resolve import Job

SMDDP = "smdistributed.dataparallel.torch.torch_smddp"


def _smddp_is_here() -> bool:
    try:
        return find_spec(SMDDP) is not None
    except (ImportError, ValueError):  # the packages that it lies in are looked for, and imported
        return False


def register_smddp() -> None:
    """Importing it makes ``smddp`` known to torch."""
    importlib.import_module(SMDDP)


def check_backend(job: Job) -> None:
    """Refuse a backend that is not here, or that does not carry tensors of these devices."""
    backend, on_cpu = job.config.cluster.backend, job.cluster.device.name == "cpu"
    if backend is None:
        return
    if on_cpu != (backend == "gloo"):
        raise BadInput(
            f'cluster.backend = "{backend}" does not carry tensors of {job.cluster.device.name}',
            f'cluster.backend = "{"gloo" if on_cpu else "nccl"}", or leave it out',
        )
    if backend == "smddp" and not _smddp_is_here():
        raise BadInput(
            f'cluster.backend = "smddp" needs {SMDDP}, which cannot be imported here',
            "a SageMaker training container, which has it; or leave cluster.backend out for NCCL",
        )
