"""Files as the users of other stacks write them: by hand, with variables, from notebooks, for older versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.facts.config import Config
from shoal.facts.problem import BadInput
from shoal.plan.importers import Imported, read_foreign


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def write_and_read(
        text: str, name: str, gpus: int | None = None, on: str | None = None, **beside: Any
    ) -> Imported:
        for other, settings in beside.items():
            (tmp_path / f"{other}.json").write_text(json.dumps(settings), encoding="utf-8")
        path, _, inner = name.partition(":")
        (tmp_path / path).write_text(text, encoding="utf-8")
        found = read_foreign(tmp_path / (f"{path}:{inner}" if inner else path), gpus, on)
        Config.model_validate(found.tables)
        return found

    return write_and_read


def said(found: Imported) -> str:
    return "\n".join(found.notes)


# Megatron.

ARRAYS = r"""#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
# A run on four nodes.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-4}
WORLD=$((GPUS_PER_NODE * NUM_NODES))
TP=4; PP=2
GBS=$((WORLD / (TP * PP) * 16))   # 16 sequences a replica
DATA=$1

DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --rdzv-endpoint "$(hostname):6000"
)
MODEL=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --ffn-hidden-size 14336
    --group-query-attention --num-query-groups 8
    --position-embedding-type rope --rotary-base 500000
    --max-position-embeddings 8192 --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --seq-length 8192
)
MODEL+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size ${GBS}
    --train-iters 10_000
    --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --hidden-dropout 0 --attention-dropout 0
)
PARALLEL=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --sequence-parallel
)
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \
    ${MODEL[@]} "${TRAINING[@]}" ${PARALLEL[@]} \
    --data-path $DATA --split 949,50,1 --log-interval 10 --save-interval 1000 --eval-iters 5 \
    --distributed-backend nccl 2>&1 | tee run.log
"""


def test_a_megatron_script_of_arrays(read: Any) -> None:
    found = read(ARRAYS, "train.sh")
    assert found.tables["layout"] == "fsdp=4,zero=1,tp=4,pp=2,micro=1"
    assert found.tables["model"] == {"preset": "llama3-8b"}  # by its shape: the vocabulary is the tokenizer's
    recipe = found.tables["recipe"]
    assert (recipe["batch"], recipe["seq"], recipe["steps"]) == (64, 8192, 10_000)
    assert (recipe["lr"], recipe["lr_min"], recipe["warmup"]) == (3e-4, 0.1, 500)
    assert (recipe["precision"], recipe["beta2"], recipe["eps"]) == ("bf16", 0.95, 1e-8)
    assert found.tables["checkpoint"] == {"every": 1000}
    assert "that of llama3-8b, 128256, is taken" in said(found)
    assert "name the text with --data" in said(found)
    assert "no counterpart" not in said(found)


STRINGS = r"""
GPUS_PER_NODE=8
NNODES=1
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE \
                  --nnodes $NNODES --node_rank 0 --master_addr localhost"
GPT_ARGS="
    --tensor-model-parallel-size 2 \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 4 \
    --global-batch-size 64 --rampup-batch-size 16 16 3000 \
    --lr 0.00015 \
    --train-samples 64000 --lr-warmup-samples 640 \
    --lr-decay-style cosine \
    --fp16
"
if [ -n "$MOE" ]; then
  GPT_ARGS="$GPT_ARGS --recompute-activations"
fi
CUDA_VISIBLE_DEVICES=0,1 python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py \
    $GPT_ARGS $EXTRA --vocab-file gpt2-vocab.json --tokenizer-type GPT2BPETokenizer --DDP-impl torch
"""


@pytest.mark.parametrize("name", ["pretrain.sh", "pretrain"])
def test_an_older_megatron_script_of_strings(read: Any, name: str) -> None:
    found = read(STRINGS, name)
    assert found.tables["layout"] == "dp=4,tp=2,sp=0,micro=4,recompute=selective"
    recipe = found.tables["recipe"]
    assert (recipe["steps"], recipe["warmup"], recipe["precision"]) == (1000, 10, "fp16")
    assert (recipe["dropout"], recipe["beta2"], recipe["weight_decay"]) == (
        0.1,
        0.999,
        0.01,
    )  # its own defaults
    assert recipe["batch_ramp"][0] == {"batch": 16, "samples": 1000}
    assert [one["batch"] for one in recipe["batch_ramp"]] == [16, 32, 48]
    # Twice as deep as GPT-2's smallest, and no preset: the shape itself comes back.
    assert found.shape is not None
    assert (found.shape.family, found.shape.layers, found.shape.vocab) == ("gpt2", 24, 50257)
    assert "the script has conditions" in said(found)
    assert "--DDP-impl = 'torch': no counterpart, left out" in said(found)


def test_arguments_alone(read: Any) -> None:
    text = "--tensor-model-parallel-size 2 --micro-batch-size 1\n--global-batch-size 16 --bf16 --lr 1e-4\n"
    found = read(text, "megatron.args", on="8xH100")
    assert found.tables["layout"] == "dp=4,tp=2,sp=0,micro=1"
    assert found.tables["cluster"] == {"on": "8xH100"}
    assert "model" not in found.tables


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "dp=4,cp=2,zero=1"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "fsdp=8,zero=2"),
        ("--use-torch-fsdp2", "fsdp=8"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "schedule=interleaved"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|(tt|)*2t*3L'",
            "schedule=interleaved",
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "recompute=full"),
        ("--optimizer-cpu-offload --use-distributed-optimizer", "offload=optimizer"),
    ],
)
def test_rarer_options_of_megatron(read: Any, options: str, layout: str) -> None:
    found = read(f"--micro-batch-size 1 --global-batch-size 16 {options}", "m.sh", gpus=8)
    assert set(layout.split(",")) <= set(found.tables["layout"].split(","))


# torchtitan.

TITAN = """
# torchtitan
[job]
dump_folder = "./outputs"
description = "Llama 3 8B"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
enable_async_tensor_parallel = true

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[checkpoint]
enable = true
interval = 500
async_mode = "async"
"""


def test_a_torchtitan_file(read: Any) -> None:
    found = read(TITAN, "llama3_8b.toml", gpus=8)
    assert found.tables["layout"] == "fsdp=4,tp=2,micro=1,recompute=selective"
    assert found.tables["model"] == {"preset": "llama3-8b"}
    recipe = found.tables["recipe"]
    assert (recipe["batch"], recipe["seq"], recipe["lr"], recipe["precision"]) == (4, 8192, 3e-4, "bf16")
    assert (recipe["schedule"], recipe["warmup"]) == ("linear", 200)
    assert found.tables["compile"] == {"enabled": True}
    assert found.tables["checkpoint"] == {"every": 500}
    assert "name the data with --data" in said(found)
    assert "parallelism.enable_async_tensor_parallel = True: no counterpart" in said(found)


def test_an_older_torchtitan_file(read: Any) -> None:
    text = """
    [model]
    name = "llama3"
    flavor = "debugmodel"
    [training]
    batch_size = 8
    seq_len = 2048
    data_parallel_shard_degree = 2
    tensor_parallel_degree = 2
    warmup_steps = 2
    [experimental]
    pipeline_parallel_degree = 2
    pipeline_parallel_schedule = "1F1B"
    [float8]
    enable_float8_linear = true
    """
    found = read(text, "debug.toml")
    assert found.tables["layout"] == "fsdp=2,tp=2,pp=2,micro=1,recompute=selective"
    assert found.tables["recipe"]["batch"] == 16  # a pipeline cuts what a rank is given
    assert found.tables["recipe"]["precision"] == "fp8"
    assert "name the model with --model" in said(found)
    with pytest.raises(BadInput, match="its degrees make 8 ranks, and 4 were asked for"):
        read(text, "debug.toml", gpus=4)


# Python: nothing is executed.

DICTIONARY = """
import argparse
import deepspeed
raise SystemExit("this file must not run")

parser = argparse.ArgumentParser()
args = parser.parse_args()
MICRO = 4
ds_config = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95]}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5 * 10_000_000},
}
ds_config["zero_optimization"]["stage"] = 2
engine, *_ = deepspeed.initialize(model=model, config=ds_config)
"""


def test_a_dictionary_of_deepspeed(read: Any) -> None:
    found = read(DICTIONARY, "train.py", gpus=8)
    assert found.tables["layout"] == "fsdp=8,zero=2,micro=4"
    assert found.tables["recipe"]["batch"] == 64
    assert "lr" not in found.tables["recipe"]
    assert "optimizer.params.lr = args.lr: the file does not hold its value" in said(found)
    assert found.tables["tune"]["bucket_mb"] == 5e7 * 2 / 2**20  # summed in bf16


def test_one_dictionary_of_several(read: Any) -> None:
    text = 'small = {"train_batch_size": 8}\nlarge = {"train_batch_size": 64, "zero_optimization": {"stage": 3}}\n'
    with pytest.raises(BadInput, match="holds 2 of DeepSpeed's config: small, large") as caught:
        read(text, "configs.py", gpus=8)
    assert "configs.py:small" in str(caught.value)
    assert read(text, "configs.py:large", gpus=8).tables["layout"] == "fsdp=8"
    with pytest.raises(BadInput, match=r"configs\.py:huge is not a config of any stack"):
        read(text, "configs.py:huge", gpus=8)


SMP1 = """
from sagemaker.pytorch import PyTorch
smp_options = {
    "enabled": True,
    "parameters": {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "microbatches": 4,
        "partitions": 2,
        "optimize": "speed",
        "pipeline": "interleaved",
        "placement_strategy": "cluster",
        "ddp": True,
        "shard_optimizer_state": True,
        "fp16": True,
    },
}
mpi_options = {"enabled": True, "processes_per_host": 8}
estimator = PyTorch(
    entry_point="train.py",
    role=role,
    instance_type="ml.p4d.24xlarge",
    instance_count=2,
    distribution={"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options},
    hyperparameters={"per_device_train_batch_size": 8, "max_steps": 100, "learning_rate": 2e-4},
)
"""


def test_sagemakers_first_model_parallel_library(read: Any) -> None:
    found = read(SMP1, "job.py")
    assert found.tables["layout"] == "fsdp=4,zero=1,tp=2,pp=2,micro=2"
    assert found.tables["recipe"]["batch"] == 32
    assert found.tables["recipe"]["precision"] == "fp16"
    assert found.tables["cluster"] == {"on": "16xA100-40GB"}
    assert "no counterpart" not in said(found)


def test_sagemakers_second_in_a_notebook(read: Any) -> None:
    code = [
        "%pip install sagemaker\n",
        "distribution = {\n",
        '    "torch_distributed": {"enabled": True},\n',
        '    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {\n',
        '        "hybrid_shard_degree": 8, "sm_activation_offloading": True, "tensor_parallel_degree": 2}}}}\n',
    ]
    job = ["est = PyTorch(instance_count=4, instance_type='ml.p5.48xlarge', distribution=distribution)\n"]
    cells = [
        {"cell_type": "markdown", "source": ["# distribution = {"]},
        {"cell_type": "code", "source": code},
        {"cell_type": "code", "source": job},
    ]
    found = read(json.dumps({"cells": cells}), "job.ipynb")
    assert found.tables["layout"] == "dp=2,fsdp=8,tp=2,offload=activations"
    assert found.tables["cluster"] == {"on": "32xH100"}
    assert "the script's there" in said(found)


def test_sagemakers_data_parallel_library(read: Any) -> None:
    text = """
est = PyTorch(
    instance_type="ml.p3.16xlarge", instance_count=2, hyperparameters=hp,
    distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
)
"""
    found = read(text, "ddp.py")
    assert found.tables["layout"] == "dp=16"
    assert "cluster" not in found.tables and "name the cluster with --on" in said(found)


NEMO = """
import nemo_run as run
from nemo.collections import llm

def configure(nodes: int = 2):
    recipe = llm.llama3_70b.pretrain_recipe(dir="/checkpoints", name="l3", num_nodes=4, num_gpus_per_node=8)
    recipe.trainer.strategy.tensor_model_parallel_size = 4
    recipe.trainer.strategy.pipeline_model_parallel_size = 2
    recipe.trainer.strategy.sequence_parallel = True
    recipe.trainer.max_steps = 200
    recipe.data.global_batch_size = 64
    recipe.data.micro_batch_size = 1
    recipe.optim.config.lr = 1e-4
    return recipe
"""


def test_a_recipe_of_nemo(read: Any) -> None:
    found = read(NEMO, "recipe.py")
    assert found.tables["layout"] == "dp=4,tp=4,pp=2,micro=1"
    assert found.tables["model"] == {"preset": "llama3-70b"}
    assert (found.tables["recipe"]["batch"], found.tables["recipe"]["lr"]) == (64, 1e-4)


# Scripts that launch.


def test_a_script_that_launches_with_accelerate(tmp_path: Path, read: Any) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_offload_params: false\n",
        encoding="utf-8",
    )
    text = """#!/bin/bash
MODEL=models/llama
accelerate launch --config_file fsdp.yaml --num_processes 4 run_clm.py \\
    --model_name_or_path $MODEL --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --learning_rate 2e-5 --num_train_epochs 3 --warmup_ratio 0.03 --lr_scheduler_type cosine \\
    --gradient_checkpointing --bf16 True --block_size 2048 --output_dir out --save_steps 50 --save_total_limit 3
"""
    found = read(text, "finetune.sh")
    assert found.tables["layout"] == "fsdp=4,micro=2,recompute=full"
    assert found.tables["model"] == {"init_from": "models/llama"}
    recipe = found.tables["recipe"]
    assert (recipe["batch"], recipe["epochs"], recipe["seq"]) == (64, 3.0, 2048)
    assert (recipe["warmup"], recipe["schedule"], recipe["lr"], recipe["beta2"]) == (
        0.03,
        "cosine",
        2e-5,
        0.999,
    )
    assert found.tables["checkpoint"] == {"every": 50, "keep": 3}
    assert "no counterpart" not in said(found)


def test_what_the_script_says_takes_the_place_of_auto(read: Any) -> None:
    """As Hugging Face's Trainer fills in a DeepSpeed file."""
    settings = {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 3},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    text = (
        "deepspeed --num_gpus=4 train.py --deepspeed ds.json --per_device_train_batch_size 2 --max_steps 100 "
        "--gradient_accumulation_steps 4 --learning_rate 1e-4 --warmup_steps 10 --bf16 --adam_beta2 0.98"
    )
    found = read(text, "run.sh", ds=settings)
    assert found.tables["layout"] == "fsdp=4,micro=2"
    recipe = found.tables["recipe"]
    assert (recipe["batch"], recipe["steps"], recipe["warmup"]) == (32, 100, 10)
    assert (recipe["lr"], recipe["beta2"], recipe["precision"], recipe["clip"]) == (1e-4, 0.98, "bf16", 1.0)


# Bad input: one message, with the fix.


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1\n", "a.py is not a config of any stack"),
        ("a.py", "def f(:\n", "a.py is not valid Python: line 1"),
        ("a.py", "(" * 500, "a.py is not valid Python"),
        ("a.ipynb", "{}", "a.ipynb is not a notebook"),
        ("a.sh", "echo hello\n", "a.sh is not a config of any stack"),
        ("a.sh", 'python t.py --lr "1', 'a " is left open'),
        ("a.sh", "ARGS=(--lr 1", "the array ARGS= is left open"),
        ("a.sh", "accelerate launch train.py --lr 1", "accelerate launch names no file"),
        ("a.sh", "deepspeed train.py --deepspeed", "--deepspeed names no file"),
        ("a.sh", "A=" + "x" * 100 + "\nA=$A$A" * 40, "a word is longer than"),
        ("a.sh", "A=(a b)\n" + "A=(${A[@]} ${A[@]})\n" * 40, "more than 16,384 words"),
        ("a.py", 'a = {"fp16": {}}\na["b"] = a\n', "nested deeper than"),
        ("a.py", 'a = {"fp16": {}}\n' + 'a = {"x": a, "y": a}\n' * 40, "stands for more than"),
        ("a.toml", "a = [", "a.toml is not valid TOML"),
        ("a.toml", "[recipe]\nlr = 1.0\n", "a.toml is a Shoal config already"),
        ("a.toml", "a = 1\n", "a.toml is not a config of any stack"),
        ("a.json", json.dumps({"model_type": "llama"}), "is the config.json of a model"),
        ("a.json:x", "{}", "a name goes with a dictionary in a Python file"),
        (
            "a.py",
            'd = {"smdistributed": {"dataparallel": {"enabled": True}}}\nz = {"zero_optimization": {"stage": 1}}\n',
            "a.py holds DeepSpeed's config and SageMaker's distribution: which one is meant?",
        ),
        (
            "a.json",
            json.dumps({"distributed_type": "FSDP", "zero_optimization": {"stage": 2}}),
            "a.json holds Accelerate's config and DeepSpeed's config",
        ),
        (
            "a.sh",
            "torchrun a.py --micro-batch-size 1\ntorchrun b.py --micro-batch-size 2\n",
            "a.sh holds 2 of Megatron's arguments",
        ),
        ("a.sh", "--micro-batch-size 1 --tensor-model-parallel-size $TP", "the layout depends on it"),
        ("a.sh", "--micro-batch-size 1 --tensor-model-parallel-size 3", "8 does not divide by 3"),
        ("a.sh", "--micro-batch-size 3 --global-batch-size 16", "2 does not divide by 3"),
        ("a.sh", "--micro-batch-size x", "--micro-batch-size = 'x': must be a number"),
        (
            "a.sh",
            "--micro-batch-size 1 --num-layers 2 --hidden-size 9999999 --num-attention-heads 1 --vocab-size 9",
            "as a model, hidden",
        ),
    ],
)
def test_bad_files(read: Any, name: str, text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(text, name, gpus=8)
    assert message in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)


def test_numbers_without_end_take_no_time(read: Any) -> None:
    stages = "t|"
    for _ in range(12):
        stages = f"({stages})*9999"
    found = read(
        f"--micro-batch-size 1 --global-batch-size 1000000000 --rampup-batch-size 1 1 1000000000 "
        f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '{stages}' --num-layers 4",
        "m.sh",
        gpus=8,
    )
    assert "999999999 sizes before 1000000000, so it is left out" in said(found)
    shape = "--num-layers 1000000000 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --vocab-size 9"
    with pytest.raises(BadInput, match="as a model, layers"):
        read(f"{shape} --micro-batch-size 1 --moe-layer-freq [1]*999*999*999*999", "n.sh", gpus=1)


def test_an_option_given_twice(read: Any) -> None:
    found = read("--micro-batch-size 1 --bf16 --micro-batch-size 2", "m.sh", gpus=2)
    assert found.tables["layout"] == "dp=2,micro=2"
    assert "given twice with two values: --micro-batch-size" in said(found)


TITAN_PYTHON = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

from torchtitan.models.llama3 import model_registry


def small():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=2, seq_len=4096, steps=100),
        parallelism=ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2),
        activation_checkpoint=None,
    )


config = small()
config.training.steps = 200
"""


def test_a_torchtitan_config_in_python(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(TITAN_PYTHON)
    found = read_foreign(path)
    assert found.tables["layout"] == "fsdp=4,tp=2,micro=2"
    assert found.tables["model"] == {"preset": "llama3-8b"}
    assert found.tables["recipe"]["steps"] == 200 and found.tables["recipe"]["batch"] == 8


def test_a_file_of_many_torchtitan_configs_is_not_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(TITAN_PYTHON + TITAN_PYTHON.partition("\n\n\n")[2].replace("small", "large"))
    with pytest.raises(BadInput, match="2 configs of torchtitan"):
        read_foreign(path)
