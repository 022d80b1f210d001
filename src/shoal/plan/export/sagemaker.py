"""Export to SageMaker: a Python file that starts a training job with its SDK 3, sharded by the model parallel library
SMP v2.

Checked with the classes of SDK 3.27. SMP v2 is based on FSDP: its parameters are the number of ranks that shard a
replica (``hybrid_shard_degree``) and the degrees of tensor, context and expert parallelism. The script is assumed to
use Hugging Face's Trainer, whose arguments carry the recipe.
"""

from __future__ import annotations

import pprint
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.facts.cluster.stack import TRANSFORMERS
from shoal.facts.layout.stack_limits import nearest_recipe, without
from shoal.plan.export import trainer
from shoal.plan.export.shared import Exported, offloads, sharding, without_pipeline
from shoal.predict.workload import Workload

FILE = "sagemaker_job.py"
CHECKED = "SageMaker Python SDK 3.27.0 with SMP v2.8"
# Instance types with these devices: eight per instance.
INSTANCES = {
    "A100-40GB": "ml.p4d.24xlarge",
    "A100-80GB": "ml.p4de.24xlarge",
    "H100": "ml.p5.48xlarge",
    "H200": "ml.p5en.48xlarge",
    "B200": "ml.p6-b200.48xlarge",
}
DEVICES = 8
# The container with the library, by the library's version (SMP 2.8, built on torch 2.5.1); and a plain one.
_SMP_IMAGE = ("pytorch-smp", "2.8.0", "py311")
_PLAIN_IMAGE = ("pytorch", "2.8.0", "py312")


def write(workload: Workload) -> Exported:
    workload, cannot = without_pipeline(workload)
    workload, more = _nearest(workload)
    cannot = [*cannot, *more, *_cannot(workload), *trainer.cannot(workload)]
    command = f"SAGEMAKER_ROLE=your-role python {FILE}"
    return Exported({FILE: _script(workload)}, command, cannot, _runs_as(workload), CHECKED)


def _nearest(workload: Workload) -> tuple[Workload, list[str]]:
    """The closest layout that the library supports, and notes on the changes."""
    layout, notes = workload.layout, []
    if layout.recompute == "selective":
        notes.append("recompute=selective: blocks are repeated as a whole; nearest: full")
        layout = layout.replace(recompute="full")
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        notes.append("cp_kind=ulysses: nearest: SMP's own exchange of keys and values")
        layout = layout.replace(cp_kind="ring")
    part = offloads(workload).get("activations")
    if part is not None and layout.recompute != "full":
        notes.append(f"offload={part} without recompute=full: SMP offloads checkpoints; nearest: without it")
        layout = layout.replace(offload=without(layout, "activations"))
    return replace(workload, layout=layout), notes


def _runs_as(workload: Workload) -> Workload:
    """FSDP with everything sharded; offload as SMP does it."""
    layout = workload.layout
    kept = without(layout, "optimizer", "params")
    whole = tuple(part.model_copy(update={"fraction": 1.0, "nvme": False}) for part in kept)
    zero = layout.zero if layout.zero == 3 or layout.shards == 1 else 2
    recipe = nearest_recipe(TRANSFORMERS.name, workload.recipe)
    layout = layout.replace(unit=1, zero=zero, offload=whole)
    return replace(workload, layout=layout, recipe=recipe, stack=TRANSFORMERS)


def by_smp(workload: Workload) -> bool:
    """Whether SMP is needed: plain replicas only need torchrun."""
    return workload.layout.world > workload.layout.dp


def degrees(workload: Workload) -> dict[str, Any]:
    """SMP's parameters."""
    layout = workload.layout
    found: dict[str, Any] = {
        # Context ranks hold different shards too, so they count here.
        "hybrid_shard_degree": layout.shards,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "random_seed": workload.recipe.seed,
    }
    if "activations" in offloads(workload):
        found |= {"sm_activation_offloading": True, "activation_loading_horizon": 2}
    return found


def _instances(workload: Workload) -> tuple[str, int]:
    """The instance type, and how many: all devices of each are used."""
    kind = INSTANCES.get(workload.cluster.device.name, "ml.p5.48xlarge")
    return kind, -(-workload.layout.world // DEVICES)


def _script(workload: Workload) -> str:
    kind, count = _instances(workload)
    image, version, python = _SMP_IMAGE if by_smp(workload) else _PLAIN_IMAGE
    arguments = trainer.arguments(workload)
    if workload.layout.recompute == "full":
        arguments["gradient_checkpointing"] = True
    smp = "None"
    if by_smp(workload):
        lines = [f"            {name}={value!r}," for name, value in degrees(workload).items()]
        smp = "\n".join(["SMP(", *lines, "        )"])
    return f'''"""SageMaker SDK 3: {workload.model.name} in {workload.layout}."""

import os

from sagemaker.core import image_uris
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, SourceCode
from sagemaker.train.distributed import SMP, Torchrun

hyperparameters = {pprint.pformat(arguments, sort_dicts=False)}


def trainer(image: str, role: str) -> ModelTrainer:
    distributed = Torchrun(
        process_count_per_node={DEVICES},
        smp={smp},
    )
    return ModelTrainer(
        training_image=image,
        role=role,
        source_code=SourceCode(source_dir="source", entry_script="train.py"),
        compute=Compute(instance_type="{kind}", instance_count={count}),
        distributed=distributed,
        hyperparameters=hyperparameters,
    )


if __name__ == "__main__":
    image = image_uris.retrieve(
        "{image}",
        os.environ["AWS_REGION"],
        version="{version}",
        py_version="{python}",
        instance_type="{kind}",
        image_scope="training",
    )
    trainer(image, os.environ["SAGEMAKER_ROLE"]).train()
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
    for part in layout.offload:
        if part.what != "activations":
            yield f"offload={part}: nearest: CPUOffload of FSDP in the script"
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
