"""SageMaker: a Python file with the ``distribution`` dictionary of its estimator (SDK 2, SMP v2 and SMDDP).

The script is taken to use Hugging Face's Trainer, whose arguments carry the recipe.
"""

from __future__ import annotations

import pprint
from collections.abc import Iterator
from typing import Any

from shoal.plan.export import trainer
from shoal.plan.export.shared import Exported, offloads, sharding, without_pipeline
from shoal.predict.workload import Workload

FILE = "sagemaker_job.py"
# What can be rented with these devices: eight to an instance.
INSTANCES = {
    "A100-40GB": "ml.p4d.24xlarge",
    "A100-80GB": "ml.p4de.24xlarge",
    "H100": "ml.p5.48xlarge",
    "H200": "ml.p5en.48xlarge",
    "B200": "ml.p6-b200.48xlarge",
}
DEVICES = 8
# SMDDP's collectives are made for these instances, and its last release for this version of torch.
_SMDDP_DEVICES = ("A100-40GB", "A100-80GB")
_SMDDP_TORCH = ("2.2.0", "py310")
_SMP_TORCH = ("2.5.1", "py311")


def write(workload: Workload) -> Exported:
    workload, cannot = without_pipeline(workload)
    cannot = [*cannot, *_cannot(workload), *trainer.cannot(workload)]
    return Exported({FILE: _script(workload)}, f"SAGEMAKER_ROLE=your-role python {FILE}", cannot)


def distribution(workload: Workload) -> dict[str, Any]:
    """SMDDP where replicas are all there is and their instances have it; else SMP v2 over torchrun."""
    layout = workload.layout
    if _by_smddp(workload):
        return {"smdistributed": {"dataparallel": {"enabled": True}}}
    if layout.world == layout.dp:
        return {"torch_distributed": {"enabled": True}}
    parameters: dict[str, Any] = {
        # Context ranks hold different shards too, so they count here.
        "hybrid_shard_degree": layout.shards,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "random_seed": workload.recipe.seed,
    }
    if "activations" in offloads(workload):
        parameters |= {"sm_activation_offloading": True, "activation_loading_horizon": 2}
    return {
        "torch_distributed": {"enabled": True},
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
    }


def _by_smddp(workload: Workload) -> bool:
    layout = workload.layout
    return layout.world == layout.dp and layout.world > 1 and workload.cluster.device.name in _SMDDP_DEVICES


def _instances(workload: Workload) -> tuple[str, int]:
    """The kind of instance, and how many: all devices of each are used."""
    kind = INSTANCES.get(workload.cluster.device.name, "ml.p5.48xlarge")
    return kind, -(-workload.layout.world // DEVICES)


def _script(workload: Workload) -> str:
    kind, count = _instances(workload)
    version, python = _SMDDP_TORCH if _by_smddp(workload) else _SMP_TORCH
    arguments = trainer.arguments(workload)
    if workload.layout.recompute == "full":
        arguments["gradient_checkpointing"] = True
    return f'''"""SageMaker: {workload.model.name} in {workload.layout}."""

import os

from sagemaker.pytorch import PyTorch

distribution = {pprint.pformat(distribution(workload), sort_dicts=False)}

hyperparameters = {pprint.pformat(arguments, sort_dicts=False)}

if __name__ == "__main__":
    estimator = PyTorch(
        entry_point="train.py",
        source_dir="source",
        role=os.environ["SAGEMAKER_ROLE"],
        instance_type="{kind}",
        instance_count={count},
        framework_version="{version}",
        py_version="{python}",
        distribution=distribution,
        hyperparameters=hyperparameters,
    )
    estimator.fit()
'''


def _cannot(workload: Workload) -> Iterator[str]:
    layout, recipe = workload.layout, workload.recipe
    device = workload.cluster.device.name
    if device not in INSTANCES:
        yield f"{device}: no instance with eight of them is known here; nearest: ml.p5.48xlarge, H100"
    if layout.world % DEVICES:
        count = _instances(workload)[1]
        yield f"{layout.world} ranks: instances have {DEVICES} devices and use all; nearest: {count * DEVICES}"
    if sharding(workload) in (1, 2):
        yield f"zero={layout.zero}: the script's FSDP strategy says it; nearest: _HYBRID_SHARD_ZERO2 there"
    if layout.tp > 1:
        yield f"sp={int(layout.sp)}: SMP's tensor parallelism decides it; nearest: that"
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        yield "cp_kind=ulysses: nearest: SMP's own exchange of keys and values"
    if layout.recompute == "selective":
        yield "recompute=selective: nearest: full, or none"
    for part in layout.offload:
        if part.what != "activations":
            yield f"offload={part}: nearest: CPUOffload of FSDP in the script"
        elif layout.recompute != "full":
            yield f"offload={part} without recompute=full: SMP offloads checkpoints; nearest: recompute=full"
        elif part.fraction < 1 or part.nvme:
            yield f"offload={part}: nearest: all checkpoints, in host memory"
    if layout.unit > 1 and sharding(workload) == 3:
        yield f"unit={layout.unit}: the script's wrapping policy says it; nearest: one block"
    if sharding(workload):
        yield "bucket_mb, prefetch and persist_below: nearest: FSDP's own defaults"
    if recipe.precision in ("fp64", "fp8"):
        yield f"precision={recipe.precision}: nearest: {'fp32' if recipe.precision == 'fp64' else 'bf16'}"
    if workload.lora is not None:
        yield f"lora of rank {workload.lora.rank}: nearest: peft.get_peft_model in the script"
