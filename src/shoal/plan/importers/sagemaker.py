"""Import a SageMaker job: SDK 3's ``Torchrun`` and ``SMP``, or the ``distribution`` dictionary of SDK 2's estimator.

The reverse of ``plan/export/sagemaker.py``; names of SMP v1, SMDDP and MPI are read as well.
"""

from __future__ import annotations

from typing import Any

from shoal.plan.export.sagemaker import DEVICES, INSTANCES
from shoal.plan.importers import trainer
from shoal.plan.importers.python_file import Script
from shoal.plan.importers.ranks import find_share, written_layout
from shoal.plan.importers.reading import Reading

# Device counts of older instances that are still in use but never exported to.
_OLDER = {"ml.p3.2xlarge": 1, "ml.p3.8xlarge": 4, "ml.p3.16xlarge": 8, "ml.p3dn.24xlarge": 8}
_SMP = "smdistributed.modelparallel"
_INSIDE = f"{_SMP}.parameters"
_OWN_WAY = (
    *("torch_distributed.enabled", "pytorchddp.enabled", "mpi.enabled", "mpi.custom_mpi_options"),
    *(
        "smdistributed.dataparallel.enabled",
        "smdistributed.dataparallel.custom_mpi_options",
        f"{_SMP}.enabled",
    ),
    *(
        f"{_INSIDE}.{key}"
        for key in ("ddp", "optimize", "placement_strategy", "auto_partition", "default_partition")
    ),
    *(
        f"{_INSIDE}.{key}"
        for key in ("prescaled_batch", "memory_weight", "activation_loading_horizon", "contiguous")
    ),
    *(f"{_INSIDE}.{key}" for key in ("skip_tracing", "ddp_port", "delayed_parameter_initialization")),
)


def distribution(script: Script) -> dict[str, Any] | None:
    """An SDK 3 file in the form of SDK 2's dictionary; None if it is not one."""
    calls = {
        call.name: call.keywords for call in script.calls if call.name in ("ModelTrainer", "Torchrun", "SMP")
    }
    if "ModelTrainer" not in calls:
        return None
    found: dict[str, Any] = {"torch_distributed": {"enabled": "Torchrun" in calls}}
    if "SMP" in calls:
        found["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": calls["SMP"]}}
    return found


def read(reading: Reading, world: int | None, estimator: dict[str, Any]) -> dict[str, Any]:
    """The tables of a config. ``estimator``: instances and hyperparameters, if the file has them."""
    devices, cluster = _instances(reading, estimator)
    per_host = reading.count("mpi.processes_per_host")
    if devices is None and per_host and isinstance(estimator.get("instance_count"), int):
        devices = per_host * estimator["instance_count"]
    hyper = estimator.get("hyperparameters")
    script = trainer.read(hyper if isinstance(hyper, dict) else {}, reading.source, reading)
    tp, cp, ep = (
        reading.degree(f"{_INSIDE}.{axis}_parallel_degree") for axis in ("tensor", "context", "expert")
    )
    pp = max(reading.degree(f"{_INSIDE}.pipeline_parallel_degree"), reading.degree(f"{_INSIDE}.partitions"))
    inner = tp * cp * pp
    accumulation = script.accumulation
    parts = reading.count(f"{_INSIDE}.microbatches")
    micro = script.micro
    if parts and pp > 1:
        accumulation = parts * (accumulation or 1)
        micro = None if micro is None or micro % parts else micro // parts
    share = find_share(reading, world or devices, inner, None, micro, accumulation)
    if not script.recipe:
        reading.note(
            "optimizer, learning rate and schedule are the script's there; here Shoal's defaults hold"
        )
    recipe = {**script.recipe, **_precision(reading), "batch": share.batch}
    if (seed := reading.count(f"{_INSIDE}.random_seed")) is not None:
        recipe["seed"] = seed
    degrees: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "micro": share.micro}
    if pp > 1 and reading.word(f"{_INSIDE}.pipeline") == "simple":
        degrees["schedule"] = "gpipe"
    layout = written_layout(
        reading, **degrees, **_sharding(reading, share.ranks, cp), **_kept(reading, script.recompute)
    )
    reading.skip(*_OWN_WAY)
    tables: dict[str, Any] = {"layout": layout, "recipe": recipe, **script.tables}
    return tables | ({"cluster": {"on": cluster}} if cluster and world in (None, devices) else {})


def _instances(reading: Reading, estimator: dict[str, Any]) -> tuple[int | None, str | None]:
    """The total device count, and the cluster, if the instance's device is known."""
    kind, count = estimator.get("instance_type"), estimator.get("instance_count", 1)
    if not isinstance(kind, str) or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return None, None
    device = next((name for name, instance in INSTANCES.items() if instance == kind), None)
    if device is not None:
        return count * DEVICES, f"{count * DEVICES}x{device}"
    reading.note(f"instance_type {kind}: its devices are not known here; name the cluster with --on")
    each = _OLDER.get(kind)
    return (count * each if each else None), None


def _sharding(reading: Reading, ranks: int, cp: int) -> dict[str, Any]:
    """SMP v2 shards over ``hybrid_shard_degree`` ranks, context ranks included; v1 over its own degree, or its
    optimizer alone. Replicas by default.
    """
    hybrid = reading.number(f"{_INSIDE}.hybrid_shard_degree")
    older = reading.count(f"{_INSIDE}.sharded_data_parallel_degree") or 0
    optimizer = reading.flag(f"{_INSIDE}.shard_optimizer_state")
    whole = ranks * cp
    if hybrid is not None:
        shards = int(hybrid) if hybrid > 0 else whole
        if whole % shards or shards % cp:
            reading.note(f"hybrid_shard_degree {shards} does not divide {whole} ranks: fsdp={ranks} is taken")
            shards = whole
        return {"dp": whole // shards, "fsdp": shards // cp}
    if older > 1 and ranks % older == 0:
        return {"dp": ranks // older, "fsdp": older}
    if optimizer:
        return {"fsdp": ranks, "zero": 1}
    return {"dp": ranks} | ({"zero": 1} if cp > 1 else {})


def _precision(reading: Reading) -> dict[str, Any]:
    for precision in ("bf16", "fp16"):
        if reading.flag(f"{_INSIDE}.{precision}"):
            return {"precision": precision}
    return {"precision": "fp8"} if reading.flag(f"{_INSIDE}.fp8") else {}


def _kept(reading: Reading, recompute: str | None) -> dict[str, Any]:
    kept: dict[str, Any] = {} if recompute is None else {"recompute": recompute}
    offloads = [
        reading.flag(f"{_INSIDE}.{key}") for key in ("sm_activation_offloading", "offload_activations")
    ]
    if any(offloads):
        kept["offload"] = ({"what": "activations"},)
    return kept
