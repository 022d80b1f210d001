"""Accelerate, Megatron-LM, torchtitan, NeMo and SageMaker: what each part of a layout becomes."""

from __future__ import annotations

import ast
import runpy
import shlex
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.plan.exporting import ask, questions, written_by

from shoal.facts.layout.stages import cut
from shoal.plan.export import STACKS, export


def gaps(stack: str, layout: str, **others: Any) -> str:
    return "\n".join(export(stack, ask(layout, **others)).cannot)


# Accelerate.


def accelerate(layout: str, **others: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(
        export("accelerate", ask(layout, **others)).files["accelerate.yaml"]
    )
    return loaded


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp=8", "MULTI_GPU"),
        ("fsdp=8", "FSDP"),
        ("fsdp=8,zero=1", "DEEPSPEED"),
        ("fsdp=8,zero=2", "DEEPSPEED"),
        ("fsdp=4,zero=2,tp=2", "FSDP"),
        ("fsdp=4,cp=2", "FSDP"),
        ("fsdp=4,cp=2,cp_kind=ulysses", "DEEPSPEED"),
        ("tp=8", "MULTI_GPU"),
        ("dp=1", "NO"),
    ],
)
def test_accelerate_kind(layout: str, kind: str) -> None:
    assert accelerate(layout)["distributed_type"] == kind
    files = export("accelerate", ask(layout)).files
    assert ("ds_config.json" in files) == (kind == "DEEPSPEED")


def test_accelerate_degrees_multiply_to_the_world() -> None:
    for workload in questions():
        settings = yaml.safe_load(export("accelerate", workload).files["accelerate.yaml"])
        if degrees := settings.get("parallelism_config"):
            product = 1
            for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
                product *= degrees.get(f"parallelism_config_{axis}_size", 1)
            assert product == workload.layout.world


def test_accelerate_fsdp() -> None:
    given = accelerate("dp=2,fsdp=4,recompute=full,offload=optimizer+params", model="qwen3-8b")
    assert given["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Qwen3DecoderLayer"
    assert given["fsdp_config"]["fsdp_version"] == 2
    assert given["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert given["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert given["fsdp_config"]["fsdp_offload_params"] is True
    assert given["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert accelerate("fsdp=4,zero=2,tp=2")["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert "nearest: reshard_after_forward false" in gaps("accelerate", "fsdp=4,zero=2,tp=2")
    assert "nearest: fsdp=4" in gaps("accelerate", "dp=4,tp=2")
    assert "nearest: those ranks shard too, fsdp=8" in gaps("accelerate", "fsdp=4,pp=2,micro=1")


@pytest.mark.parametrize("stack", STACKS)
def test_a_loss_that_no_stack_has_is_said(stack: str) -> None:
    assert gaps(stack, "fsdp=8", z_loss=1e-4).count("z_loss=0.0001") == 1
    assert "z_loss" not in gaps(stack, "fsdp=8")


def test_accelerate_says_nothing_twice() -> None:
    said = export("accelerate", ask("fsdp=8,zero=1", dropout=0.1)).cannot
    assert len(set(said)) == len(said)


def test_accelerate_command_carries_the_recipe() -> None:
    command = export("accelerate", ask("fsdp=8,micro=4", schedule="wsd", lr_min=0.1)).command
    words = shlex.split(command)
    given = dict(pairwise(words))
    assert given["--per_device_train_batch_size"] == "4"
    assert given["--gradient_accumulation_steps"] == "16"
    assert given["--lr_scheduler_type"] == "warmup_stable_decay"
    assert '"min_lr_ratio": 0.1' in given["--lr_scheduler_kwargs"]
    assert given["--bf16"] == "true"


# Megatron-LM.

# The names that Megatron-LM's parser has (core 0.20), as far as we write them.
MEGATRON = """
tensor-model-parallel-size sequence-parallel context-parallel-size cp-comm-type pipeline-model-parallel-size
pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage expert-model-parallel-size
expert-tensor-parallel-size recompute-granularity recompute-method recompute-num-layers recompute-modules
optimizer-cpu-offload optimizer-offload-fraction use-precision-aware-optimizer cpu-offloading-num-layers
overlap-grad-reduce ddp-bucket-size use-distributed-optimizer overlap-param-gather
num-distributed-optimizer-instances use-megatron-fsdp data-parallel-sharding-strategy no-gradient-accumulation-fusion
ckpt-format init-model-with-meta-device num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels
group-query-attention num-query-groups max-position-embeddings position-embedding-type rotary-base rotary-percent
use-rope-scaling rope-scaling-factor rotary-scaling-factor mscale mscale-all-dim window-size window-attn-skip-freq
multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim num-experts
moe-router-topk moe-ffn-hidden-size moe-grouped-gemm moe-token-dispatcher-type moe-router-load-balancing-type
moe-aux-loss-coeff moe-z-loss-coeff
moe-router-score-function moe-shared-expert-intermediate-size moe-layer-freq moe-router-num-groups
moe-router-group-topk moe-router-topk-scaling-factor moe-router-enable-expert-bias normalization norm-epsilon
qk-layernorm swiglu no-bias-gelu-fusion disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights
mock-data tokenizer-type vocab-size make-vocab-size-divisible-by micro-batch-size global-batch-size seq-length
train-iters calculate-per-token-loss optimizer adam-beta1 adam-beta2 adam-eps sgd-momentum weight-decay clip-grad lr
min-lr lr-warmup-iters lr-decay-iters lr-decay-style lr-wsd-decay-style lr-wsd-decay-iters attention-dropout
hidden-dropout seed init-method-std bf16 fp16 fp8-format initial-loss-scale loss-scale-window hysteresis
grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 tp-comm-overlap cross-entropy-loss-fusion
cross-entropy-fusion-impl
"""


def megatron(layout: str, **others: Any) -> dict[str, str]:
    return megatron_arguments(export("megatron", ask(layout, **others)).files["megatron.sh"])


def megatron_arguments(script: str) -> dict[str, str]:
    words = shlex.split(script[script.index("ARGUMENTS=(") + len("ARGUMENTS=(") : script.index("\n)\n")])
    given: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            given[word[2:]] = ""
        else:
            last = list(given)[-1]
            given[last] = f"{given[last]} {word}".strip()
    return given


def test_megatron_writes_only_arguments_that_are_there() -> None:
    for workload in questions():
        given = megatron_arguments(export("megatron", workload).files["megatron.sh"])
        assert given.keys() <= set(MEGATRON.split())


def test_megatron_sharding() -> None:
    assert "use-distributed-optimizer" not in megatron("dp=8")
    given = megatron("dp=2,fsdp=4,zero=1")
    assert given["num-distributed-optimizer-instances"] == "2" and "use-megatron-fsdp" not in given
    assert megatron("fsdp=8,zero=2")["data-parallel-sharding-strategy"] == "optim_grads"
    assert megatron("fsdp=8")["data-parallel-sharding-strategy"] == "optim_grads_params"
    # Its FSDP has no pipelines.
    assert "use-megatron-fsdp" not in megatron("fsdp=4,pp=2,micro=1")
    assert "zero=1" in gaps("megatron", "fsdp=4,pp=2,micro=1")


def test_megatron_queues_follow_from_the_layout() -> None:
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in export("megatron", ask("fsdp=8")).files["megatron.sh"]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in export("megatron", ask("tp=8")).files["megatron.sh"]


def test_megatron_stages_are_cut_as_ours() -> None:
    workload = ask("tp=2,pp=4,schedule=interleaved,chunks=2,micro=1")
    given = megatron_arguments(export("megatron", workload).files["megatron.sh"])
    sizes = [len(stage.layers) for stage in cut(workload.model, 8, workload.recipe.seq)]
    parts = given["pipeline-model-parallel-layout"].split("|")
    assert [int(part.strip("EL").removeprefix("t*")) for part in parts] == sizes
    assert parts[0][0] == "E" and parts[-1][-1] == "L"
    # Equal stages are its default.
    even = megatron("pp=2,schedule=interleaved,chunks=2,micro=1", model="llama2-7b")
    assert even["num-layers-per-virtual-pipeline-stage"] == "8"
    assert "pipeline-model-parallel-layout" not in even


def test_megatron_shapes() -> None:
    given = megatron("fsdp=8,ep=8,micro=1", model="deepseek-v3")
    assert given["moe-layer-freq"].startswith("[0,0,0,1,")
    assert given["kv-lora-rank"] == "512" and "kv-channels" not in given
    assert given["moe-router-topk-scaling-factor"] == "2.5"
    given = megatron("dp=8", model="qwen2-7b")
    assert {"disable-bias-linear", "add-qkv-bias", "swiglu"} <= given.keys()
    assert megatron("dp=8", model="mistral-7b")["window-size"] == "4095,0"
    assert megatron("dp=8", model="gpt2", seq=1024)["position-embedding-type"] == "learned_absolute"
    assert "side by side" in gaps("megatron", "dp=8", model="gpt-neox-20b", seq=2048)
    assert megatron("dp=8", model="llama3.2-1b")["rope-scaling-factor"] == "32.0"


# torchtitan.


def titan_tables(text: str) -> dict[str, Any]:
    """The keyword arguments of every class of settings, by its name."""
    return {
        ast.unparse(node.func): {word.arg or "": literal(word.value) for word in node.keywords}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    }


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def torchtitan(layout: str, **others: Any) -> dict[str, Any]:
    return titan_tables(export("torchtitan", ask(layout, **others)).files["torchtitan_config.py"])


def test_torchtitan_batches() -> None:
    for workload in (one for one in questions() if written_by("torchtitan", one)):
        given = titan_tables(export("torchtitan", workload).files["torchtitan_config.py"])
        axes, training = given["ParallelismConfig"], given["TrainingConfig"]
        ranks = axes["data_parallel_replicate_degree"] * axes["data_parallel_shard_degree"]
        assert training["global_batch_size"] % (training["local_batch_size"] * ranks) == 0
        product = ranks
        for axis in ("tensor", "context", "pipeline"):
            product *= axes[f"{axis}_parallel_degree"]
        assert product == workload.layout.world


def test_torchtitan_pipeline() -> None:
    given = torchtitan("fsdp=2,pp=4,schedule=interleaved,chunks=2,micro=2", batch=64)
    axes = given["ParallelismConfig"]
    assert given["TrainingConfig"]["local_batch_size"] == 32  # a pipeline is given the whole step
    assert given["TrainingConfig"]["disable_cuda_graphs"] is True  # which hold no pipeline
    assert axes["pipeline_parallel_microbatch_size"] == 2
    assert axes["pipeline_parallel_schedule"] == "Interleaved1F1B"
    modules = [module for part in axes["module_fqns_per_model_part"] for module in part]
    layers = [f"layers.{layer}" for layer in range(32)]
    assert len(axes["module_fqns_per_model_part"]) == 8
    assert modules == ["tok_embeddings", *layers, "norm", "lm_head"]
    stages = torchtitan("pp=4,schedule=zb,micro=1")["ParallelismConfig"]["module_fqns_per_model_part"]
    assert len(stages) == 8


def test_torchtitan_flavors() -> None:
    assert torchtitan("fsdp=8")["model_registry"]["flavor"] == "8B"
    text = export("torchtitan", ask("fsdp=8", model="qwen3-30b-a3b")).files["torchtitan_config.py"]
    assert "from torchtitan.models.qwen3 import model_registry" in text
    assert "nearest: its flavor" in gaps("torchtitan", "fsdp=8", model="llama3-405b")


def test_torchtitan_policies() -> None:
    assert torchtitan("fsdp=8,zero=2")["ParallelismConfig"]["fsdp_reshard_after_forward"] == "never"
    for recompute, kind in (
        ("none", None),
        ("selective", "SelectiveAC.Config()"),
        ("full", "FullAC.Config()"),
    ):
        given = torchtitan(f"fsdp=8,recompute={recompute}")["Trainer.Config"]
        assert given["activation_checkpoint"] == kind
    schedule = "LRSchedulersContainer.Config"
    assert torchtitan("fsdp=8", schedule="wsd")[schedule]["decay_ratio"] == 0.2
    assert torchtitan("fsdp=8", schedule="constant")[schedule]["decay_ratio"] == 0.0
    assert torchtitan("tp=8,sp=0")["ParallelismConfig"]["enable_sequence_parallel"] is False
    assert torchtitan("dp=4,tp=2")["ParallelismConfig"]["data_parallel_replicate_degree"] == 4
    assert "nearest: ring" in gaps("torchtitan", "cp=8,cp_kind=ulysses")
    assert "Float8LinearConverter.Config" in torchtitan("fsdp=8", precision="fp8")


# NeMo.


def nemo(layout: str, **others: Any) -> dict[str, dict[str, Any]]:
    """The keyword arguments of every call in the script, by the name of what is called."""
    tree = ast.parse(export("nemo", ask(layout, **others)).files["nemo_run.py"])
    return {
        ast.unparse(node.func): {
            word.arg or "": ast.literal_eval(word.value)
            for word in node.keywords
            if isinstance(word.value, (ast.Constant, ast.List, ast.Tuple))
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }


def test_nemo_strategy() -> None:
    calls = nemo("fsdp=2,tp=2,pp=2,micro=1")
    strategy = calls["nl.MegatronStrategy"]
    assert strategy["tensor_model_parallel_size"] == strategy["pipeline_model_parallel_size"] == 2
    assert strategy["sequence_parallel"] is True and "fsdp" not in strategy
    assert calls["nl.Trainer"]["devices"] == 8
    assert calls["llm.MockDataModule"]["global_batch_size"] == 512
    assert nemo("fsdp=8")["nl.MegatronStrategy"]["fsdp"] == "megatron"
    sharding = nemo("fsdp=8")["DistributedDataParallelConfig"]["data_parallel_sharding_strategy"]
    assert sharding == "optim_grads_params"


def test_nemo_models() -> None:
    assert nemo("fsdp=8,ep=8", model="deepseek-v3")["llm.DeepSeekV3Config"]["kv_lora_rank"] == 512
    assert nemo("fsdp=8", model="llama3.2-1b")["llm.Llama31Config"]["scale_factor"] == 32.0
    assert nemo("fsdp=8")["llm.GPTConfig"]["num_query_groups"] == 8
    assert nemo("fsdp=8", schedule="linear")["WarmupAnnealingScheduler"]["max_steps"] == 300
    assert "WarmupPolicyScheduler" in gaps("nemo", "fsdp=8", schedule="wsd")


# SageMaker.


@pytest.fixture
def sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the file gives to the SDK's classes, by their names; the SDK itself is not needed for that."""
    given: dict[str, Any] = {}

    def recorder(name: str) -> Any:
        def record(**keywords: Any) -> str:
            given[name] = keywords
            return name

        return record

    classes = {
        "sagemaker": (),
        "sagemaker.core": ("image_uris",),
        "sagemaker.train": ("ModelTrainer",),
        "sagemaker.train.configs": ("Compute", "SourceCode"),
        "sagemaker.train.distributed": ("SMP", "Torchrun"),
    }
    for module, names in classes.items():
        made = types.ModuleType(module)
        vars(made).update({name: recorder(name) for name in names})
        monkeypatch.setitem(sys.modules, module, made)

    def run(layout: str, **others: Any) -> dict[str, Any]:
        given.clear()
        path = tmp_path / "job.py"
        text = export("sagemaker", ask(layout, **others)).files["sagemaker_job.py"]
        path.write_text(text, encoding="utf-8")
        runpy.run_path(str(path))["trainer"]("image", "role")
        return dict(given)

    return run


def test_sagemaker_smp(sagemaker: Any) -> None:
    job = sagemaker("dp=2,fsdp=2,tp=2,cp=2,recompute=full,offload=activations", batch=64)
    assert job["SMP"]["hybrid_shard_degree"] == 4  # context ranks among them
    assert job["SMP"]["tensor_parallel_degree"] == job["SMP"]["context_parallel_degree"] == 2
    assert job["SMP"]["sm_activation_offloading"] is True
    assert job["Torchrun"] == {"process_count_per_node": 8, "smp": "SMP"}
    assert job["Compute"] == {"instance_type": "ml.p5.48xlarge", "instance_count": 2}
    assert job["ModelTrainer"]["hyperparameters"]["gradient_checkpointing"] is True


def test_sagemaker_data_parallel(sagemaker: Any) -> None:
    job = sagemaker("dp=16", on="16xA100-80GB")
    assert job["Torchrun"]["smp"] is None and "SMP" not in job
    assert job["Compute"]["instance_type"] == "ml.p4de.24xlarge"
    assert "nearest: 8" in gaps("sagemaker", "dp=4")
    assert "there is no pipeline" in gaps("sagemaker", "fsdp=4,pp=2,micro=1")
