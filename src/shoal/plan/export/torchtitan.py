"""Export to torchtitan: a config in Python, which its ``ConfigManager`` loads by module and name, as of 0.3.0.

Versions up to 0.2 read TOML; ``shoal init --from`` still does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.facts.cluster.stack import TITAN_CHUNKED
from shoal.facts.layout.stages import cut
from shoal.facts.model import Model
from shoal.facts.problem import BadInput
from shoal.plan.export.shared import Code, Exported, call, offloads, settled, sharding, torchrun
from shoal.predict.workload import Workload

MODULE, NAME = "torchtitan_config", "run"
FILE = f"{MODULE}.py"
CHECKED = "torchtitan 0.3.0"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
# The shapes it knows by name, as (family, layers, hidden, heads): name and flavor.
_FLAVORS = {
    ("llama", 32, 4096, 32): ("llama3", "8B"),
    ("llama", 80, 8192, 64): ("llama3", "70B"),
    ("llama", 126, 16384, 128): ("llama3", "405B"),
    ("qwen3", 28, 1024, 16): ("qwen3", "0.6B"),
    ("qwen3", 28, 2048, 16): ("qwen3", "1.7B"),
    ("qwen3", 36, 2560, 32): ("qwen3", "4B"),
    ("qwen3", 36, 4096, 32): ("qwen3", "8B"),
    ("qwen3", 40, 5120, 40): ("qwen3", "14B"),
    ("qwen3", 64, 5120, 64): ("qwen3", "32B"),
    ("qwen3_moe", 48, 2048, 32): ("qwen3", "30B-A3B"),
    ("qwen3_moe", 94, 4096, 64): ("qwen3", "235B-A22B"),
    ("deepseek_v3", 61, 7168, 128): ("deepseek_v3", "671B"),
}
_LLAMA3_VOCABULARY = 128256  # older Llamas share its shapes but not its vocabulary


def write(workload: Workload) -> Exported:
    runs_as, notes = settled(TITAN_CHUNKED, workload)
    workload = replace(workload, layout=runs_as.layout)
    command = f"{torchrun(workload)} {FILE}"
    cannot = [*notes, *_cannot(workload)]
    return Exported({FILE: _script(workload)}, command, cannot, replace(runs_as, lora=None), CHECKED)


def _script(workload: Workload) -> str:
    layout, recipe = workload.layout, workload.recipe
    family, flavor = _known_flavor(workload.model)
    kinds = {"none": None, "selective": Code("SelectiveAC.Config()"), "full": Code("FullAC.Config()")}
    converted = imported = ""
    if recipe.precision == "fp8":
        converted = f", converters=[Float8LinearConverter.Config(model_compile_enabled={compiles(workload)})]"
        imported = "from torchtitan.components.quantization import Float8LinearConverter\n"
    parts = {
        "loss": Code(
            "ChunkedLossWrapper.Config("
            "loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)))"
        ),
        "hf_assets_path": f"./assets/hf/{workload.model.name}",
        "model_spec": Code("spec"),
        "optimizer": Code(call("default_adamw", _optimizer(workload), depth=2)),
        "lr_scheduler": Code(call("LRSchedulersContainer.Config", _schedule(workload), depth=2)),
        "training": Code(call("TrainingConfig", _training(workload), depth=2)),
        # To replace with your own.
        "dataloader": Code('HuggingFaceTextDataLoader.Config(dataset="c4")'),
        "parallelism": Code(call("ParallelismConfig", _parallelism(workload), depth=2)),
        "activation_checkpoint": kinds[layout.recompute],
        "compile": Code(call("CompileConfig", {"enable": compiles(workload)}, depth=2)),
        "debug": Code(call("DebugConfig", {"seed": recipe.seed}, depth=2)),
    }
    return f'''"""torchtitan 0.3: {workload.model.name} in {layout}."""

# In place of c4 name your own dataset.
import sys

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
{imported}from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{family} import model_registry
from torchtitan.train import main
from torchtitan.trainer import Trainer


def {NAME}() -> Trainer.Config:
    spec = model_registry(flavor="{flavor}"{converted})
    return {call("Trainer.Config", parts, depth=1)}


if __name__ == "__main__":
    # As: torchrun … -m torchtitan.train --module {MODULE} --config {NAME}, from any directory.
    sys.argv[1:1] = ["--module", "{MODULE}", "--config", "{NAME}"]
    main()
'''


def compiles(workload: Workload) -> bool:
    """The plan was priced compiled, so the export compiles, unless that was disabled."""
    return workload.compile is not False


def _optimizer(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    return {
        "lr": recipe.peak_lr,
        "betas": (recipe.beta1, recipe.beta2),
        "eps": recipe.eps,
        "weight_decay": recipe.weight_decay,
    }


def _training(workload: Workload) -> dict[str, Any]:
    layout, recipe = workload.layout, workload.recipe
    # A pipeline takes all micro-batches of a step at once and splits them itself.
    local = workload.micro * workload.accumulation if layout.pp > 1 else workload.micro
    # CUDA graphs support neither pipelines nor anything that waits for the host: expert dispatch, offloaded states.
    by_hand = layout.pp > 1 or layout.ep > 1 or bool(layout.offload)
    return {
        **({"disable_cuda_graphs": True} if by_hand else {}),
        "local_batch_size": local,
        "global_batch_size": recipe.batch,
        "seq_len": recipe.seq,
        "steps": recipe.steps,
        # 0 would scale every gradient to nothing.
        "max_norm": recipe.clip or 1e9,
        "dtype": "bfloat16" if recipe.states == "bf16" else "float32",
        "mixed_precision_param": "bfloat16" if recipe.precision in ("bf16", "fp8", "fp16") else "float32",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": bool(offloads(workload)),
    }


def _schedule(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    schedule: dict[str, Any] = {"warmup_steps": recipe.warmup_steps, "min_lr_factor": recipe.lr_min}
    if recipe.schedule == "constant":
        return schedule | {"decay_ratio": 0.0, "decay_type": "linear"}
    if recipe.schedule == "wsd":
        return schedule | {"decay_ratio": recipe.decay_steps / recipe.steps, "decay_type": "linear"}
    return schedule | {"decay_type": recipe.schedule}


def _parallelism(workload: Workload) -> dict[str, Any]:
    layout = workload.layout
    given: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp,
        "data_parallel_shard_degree": layout.fsdp,
        # With a pipeline, the default keeps parameters gathered for all micro-batches, as Shoal does.
        "fsdp_reshard_after_forward": "default" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.tp > 1 and not layout.sp:
        given["enable_sequence_parallel"] = False
    if layout.pp > 1:
        given["pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        given["pipeline_parallel_microbatch_size"] = workload.micro
        given["module_fqns_per_model_part"] = _stages(workload)
    return given


def _stages(workload: Workload) -> list[list[str]]:
    """Shoal's stages, in torchtitan's module names."""
    layout = workload.layout
    return [
        [
            *(["tok_embeddings"] if stage.first else []),
            *(f"layers.{layer}" for layer in stage.layers),
            *(["norm", "lm_head"] if stage.last else []),
        ]
        for stage in cut(workload.model, layout.pp * layout.chunks, workload.recipe.seq)
    ]


def flavor_of(model: Model) -> tuple[str, str] | None:
    """Its name for a model of this shape; None if it has none."""
    if model.family == "llama" and model.vocab != _LLAMA3_VOCABULARY:
        return None
    return _FLAVORS.get((model.family, model.layers, model.hidden, model.heads))


def _known_flavor(model: Model) -> tuple[str, str]:
    """Raises for unknown shapes, since another flavor would train another model."""
    found = flavor_of(model)
    if found is None:
        names = ", ".join(f"{family} {flavor}" for family, flavor in _FLAVORS.values())
        raise BadInput(
            f"--export torchtitan: it has no model of {model.name}'s shape ({model.layers} layers, dim {model.hidden}, "
            f"{model.heads} heads, {model.vocab:,} tokens)",
            f"one that it has: {names}; or another stack: --export megatron, --export deepspeed",
        )
    return found


def _cannot(workload: Workload) -> Iterator[str]:
    recipe, model = workload.recipe, workload.model
    if model.family == "llama" and model.rope_scaling is not None:
        yield "the scaled rotary positions of Llama 3.1: nearest: its flavor, without them"
    if sharding(workload) == 2:
        yield (
            f"zero={workload.layout.zero}: parameters are sharded too; nearest: fsdp_reshard_after_forward never, "
            "which gathers them once per micro-batch"
        )
    yield from _cannot_compute(workload)
    if sharding(workload) == 3 and (workload.tune.prefetch != 1 or workload.tune.persist_below):
        yield "prefetch and persist_below: FSDP2's own defaults hold; nearest: those"
    if recipe.dropout:
        yield f"dropout={recipe.dropout}: its models have none; nearest: 0"
    if recipe.z_loss:
        yield f"z_loss={recipe.z_loss}: its loss is the cross-entropy alone; nearest: 0"


def _cannot_compute(workload: Workload) -> Iterator[str]:
    recipe = workload.recipe
    if recipe.optimizer == "sgd":
        yield "optimizer=sgd: nearest: AdamW"
    if recipe.precision in ("fp16", "fp64"):
        yield f"precision={recipe.precision}: nearest: {'bf16' if recipe.precision == 'fp16' else 'fp32'}"
    if recipe.states == "int8":
        yield "states=int8: nearest: fp32"
    if recipe.reduce == "bf16":
        yield "reduce=bf16: gradients are summed in fp32; nearest: that"
    if not recipe.clip:
        yield "clip=0: nearest: a limit that no gradient reaches"
    if recipe.weight_decay:
        yield "weight decay on matrices only: its optimizer decays norms too; nearest: that"
