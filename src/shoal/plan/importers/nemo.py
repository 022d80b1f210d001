"""Import a NeMo 2 or Megatron-Bridge script, from its calls and assignments.

The reverse of ``plan/export/nemo.py`` and ``plan/export/bridge.py``. Both run on Megatron's core and use its names
with underscores, so their settings are read as Megatron's options.
"""

from __future__ import annotations

import re
from typing import Any

from shoal.facts.model import Model
from shoal.facts.model.presets import PRESETS
from shoal.plan.importers import megatron
from shoal.plan.importers.python_file import Script
from shoal.plan.importers.reading import Reading, Unknown

# Calls whose keywords are settings, by the end of their name.
_SETTINGS = (
    "Strategy",
    "Trainer",
    "DataParallelConfig",
    "OptimizerConfig",
    "Scheduler",
    "DataModule",
    "MixedPrecision",
    *("TrainingConfig", "SchedulerConfig", "RNGConfig", "MixedPrecisionConfig", "ModelProvider"),
)
_SHAPE = re.compile(r"(GPT|Llama|Mistral|Mixtral|Qwen|DeepSeek|Nemotron|Gemma|Phi|Starcoder)\w*Config\w*")
# NeMo's names for Megatron's options, where they differ by more than underscores.
_NAMES = {
    "layernorm_epsilon": "norm-epsilon",
    "num_moe_experts": "num-experts",
    "adam_beta1": "adam-beta1",
    "warmup_steps": "lr-warmup-iters",
    "bucket_size": "ddp-bucket-size",
    "max_steps": "train-iters",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "fp8": "fp8-format",
    "old_context_len": "original-max-position-embeddings",
    "rope_scaling": "use-rope-scaling",
}
_SCHEDULERS = {
    "CosineAnnealingScheduler": "cosine",
    "WarmupAnnealingScheduler": "linear",
    "WarmupPolicyScheduler": "constant",
    "WarmupHoldPolicyScheduler": "constant",
}
_OWN_WAY = (
    *("fp32", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "multi_latent_attention"),
    *(
        "accelerator",
        "strategy",
        "plugins",
        "use_distributed_sampler",
        "ddp",
        "config",
        "lr_scheduler",
        "moe_grouped_gemm",
    ),
    *("activation_func", "low_freq_factor", "high_freq_factor", "pipeline_dtype", "bias_activation_fusion"),
    *(
        "cpu_offloading",
        "log_every_n_steps",
        "enable_checkpointing",
        "logger",
        "callbacks",
        "gradient_as_bucket_view",
    ),
    *(
        "moe_token_dispatcher_type",
        "constant_steps",
        "autocast_enabled",
        "average_in_collective",
        "params_dtype",
    ),
    *(
        "ckpt_async_save",
        "ckpt_parallel_load",
        "precision",
        "grad_reduce_in_fp32",
        "fsdp",
        "num_sanity_val_steps",
    ),
    *(
        "num_train_samples",
        "num_val_samples",
        "num_test_samples",
        "num_workers",
        "paths",
        "replace_sampler_ddp",
    ),
    *(
        "check_for_nan_in_grad",
        "overlap_param_gather_with_optimizer_step",
        "save_ckpt_format",
        "limit_test_batches",
    ),
)


def is_nemo(script: Script) -> bool:
    names = {call.name for call in script.calls} | {path.rpartition(".")[2] for path in script.attributes}
    recipe = any(re.search(r"\bllm\.\w+\.(pretrain|finetune)_recipe$", call.path) for call in script.calls)
    bridge = any(module.startswith("megatron.bridge") for module in script.imports.values())
    return "MegatronStrategy" in names or recipe or (bridge and "ConfigContainer" in names)


def read(
    script: Script, source: str, world: int | None, outer: Reading
) -> tuple[dict[str, Any], Model | None]:
    """The tables of a config, and the model if no preset has its shape."""
    said = _said(script)
    options, spelled = _options(said)
    for call in script.calls:
        if call.name in _SCHEDULERS:
            options["lr-decay-style"] = _SCHEDULERS[call.name]
            spelled["lr-decay-style"] = call.name
    reading = Reading(options, source, outer.problems, spell=lambda key: spelled.get(key, key))
    tables, shape = megatron.read(reading, world or _ranks({**script.values, **said}))
    if "model" not in tables and (preset := _preset(script)) is not None:
        # A class of this name has its own shape, which the keywords change.
        tables["model"], shape = {"preset": preset}, None
        reading.notes = [note for note in reading.notes if not note.startswith("the model (")]
    outer.notes += [*reading.notes, *reading.left()]
    return tables, shape


def _said(script: Script) -> dict[str, Any]:
    """Every keyword of a call that holds settings; attribute assignments come later and win."""
    said: dict[str, Any] = {}
    for call in script.calls:
        if call.name.endswith(_SETTINGS) or _SHAPE.fullmatch(call.name) or call.name.endswith("_recipe"):
            said |= call.keywords
    said |= {path.rpartition(".")[2]: value for path, value in script.attributes.items()}
    return said


def _options(said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings as Megatron's options, and how the file spells each."""
    options: dict[str, Any] = {}
    spelled: dict[str, str] = {}

    def put(option: str, value: Any, name: str) -> None:
        options[option], spelled[option] = value, name

    for name, value in said.items():
        if name in _OWN_WAY or name in _SPECIAL or name in ("devices", "num_nodes", "num_gpus_per_node"):
            continue
        put(_NAMES.get(name, name.replace("_", "-")), value, name)
    for name, (option, when) in _SPECIAL.items():
        value = said.get(name)
        if value is None or isinstance(value, Unknown):
            continue
        if (written := when(value)) is not None:
            put(option, written, name)
    _precision(said, put)
    if said.get("fsdp") == "megatron":
        put("use-megatron-fsdp", True, "fsdp")
    if "num_query_groups" in said:
        put("group-query-attention", True, "num_query_groups")
    if "kv_lora_rank" in said:
        put("multi-latent-attention", True, "kv_lora_rank")
    if "scale_factor" in said:
        put("use-rope-scaling", True, "scale_factor")
    if said.get("gated_linear_unit") is False and said.get("bias_activation_fusion") is not True:
        put("no-bias-gelu-fusion", True, "activation_func")
    return options, spelled


def _precision(said: dict[str, Any], put: Any) -> None:
    precision = str(said.get("precision", ""))
    for short, option in (("bf16", "bf16"), ("16", "fp16")):
        if precision.startswith(short):
            put(option, True, "precision")
    if said.get("grad_reduce_in_fp32") is False:
        put("grad-reduce-in-bf16", True, "grad_reduce_in_fp32")


# Inverted or transformed keywords: Megatron's option, and the conversion of the value.
_SPECIAL: dict[str, tuple[str, Any]] = {
    "share_embeddings_and_output_weights": (
        "untie-embeddings-and-output-weights",
        lambda on: True if not on else None,
    ),
    "add_bias_linear": ("disable-bias-linear", lambda on: True if not on else None),
    "gated_linear_unit": ("swiglu", lambda on: True if on else None),
    "num_query_groups": ("num-query-groups", lambda count: count),
    "scale_factor": ("rope-scaling-factor", lambda factor: factor),
    "window_size": (
        "window-size",
        lambda pair: ",".join(map(str, pair)) if isinstance(pair, (list, tuple)) else None,
    ),
    "window_attn_skip_freq": ("window-attn-skip-freq", str),
    "moe_layer_freq": ("moe-layer-freq", str),
    "vocab_size": ("padded-vocab-size", lambda count: count),
}


def _ranks(said: dict[str, Any]) -> int | None:
    each = said.get("devices", said.get("num_gpus_per_node"))
    nodes = said.get("num_nodes", 1)
    counts = [isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in (each, nodes)]
    return each * nodes if all(counts) and isinstance(each, int) else None


def _preset(script: Script) -> str | None:
    """The preset, from a recipe's name (``llm.llama3_8b``) or a config's (``Llama3Config8B``)."""
    words = [part for call in script.calls for part in call.path.split(".")]
    words += [part for path in script.attributes for part in path.split(".")]
    plain = {_letters(name): name for name in PRESETS}
    return next(
        (plain[key] for word in words if (key := _letters(word.replace("Config", ""))) in plain), None
    )


def _letters(word: str) -> str:
    """Normalise so that ``llama3-8b``, ``llama3_8b`` and ``Llama38B`` are equal."""
    return re.sub(r"[^a-z0-9]", "", word.lower())
