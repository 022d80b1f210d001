"""The collectives' backend: NCCL, gloo or, in SageMaker's containers, its own (SMDDP)."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from shoal.facts.problem import BadInput
from shoal.plan.resolve import Job

SMDDP = "smdistributed.dataparallel.torch.torch_smddp"


def _smddp_is_here() -> bool:
    try:
        return find_spec(SMDDP) is not None
    except (ImportError, ValueError):  # its packages are searched for, and imported
        return False


def register_smddp() -> None:
    """Import SMDDP, which registers ``smddp`` with torch."""
    importlib.import_module(SMDDP)


def check_backend(job: Job) -> None:
    """Refuse a backend that is not installed, or that does not support these devices."""
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
