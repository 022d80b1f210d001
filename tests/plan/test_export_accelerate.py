"""Accelerate's own parser on every exported YAML, and the Trainer's on every recipe."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from tests.plan.exporting import questions

from shoal.plan.export import export
from shoal.predict.workload import Workload

# Set by ``accelerate launch`` as environment variables under other names than the plugin's own arguments.
RENAMED = {
    "fsdp_version": "fsdp_version",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
}


def loaded(workload: Workload, folder: Path) -> Any:
    path = folder / "accelerate.yaml"
    path.write_text(export("accelerate", workload).files["accelerate.yaml"], encoding="utf-8")
    return load_config_from_file(str(path))


@pytest.mark.parametrize(
    "workload", questions(), ids=lambda workload: f"{workload.model.name} {workload.layout}"
)
def test_accelerate_loads_it(workload: Workload, tmp_path: Path) -> None:
    config = loaded(workload, tmp_path)
    assert config.num_processes == workload.layout.world
    # What a table holds becomes an argument of accelerate launch: one it does not know would be lost without a word.
    known = {action.dest for action in launch_command_parser()._actions}
    for table in (config.fsdp_config, config.parallelism_config, config.deepspeed_config):
        assert table.keys() <= known
    if config.parallelism_config:
        sizes = {
            name.removeprefix("parallelism_config_"): size for name, size in config.parallelism_config.items()
        }
        degrees = ParallelismConfig(**{name: size for name, size in sizes.items() if name.endswith("_size")})
        assert degrees.total_size == workload.layout.world
    if config.fsdp_config:
        given = {
            RENAMED.get(name, name.removeprefix("fsdp_")): value for name, value in config.fsdp_config.items()
        }
        given["auto_wrap_policy"] = given["auto_wrap_policy"].lower()
        plugin = FullyShardedDataParallelPlugin(**given)
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is (workload.layout.zero == 3)


def test_the_trainer_takes_the_recipe(tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    for workload in questions():
        words = shlex.split(export("accelerate", workload).command)
        options = words[words.index("train.py") + 1 :]
        if workload.recipe.precision in ("bf16", "fp16"):
            options.append("--use_cpu")  # this machine's devices are not the plan's
        (given,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            [*options, "--output_dir", str(tmp_path)]
        )
        assert given.learning_rate == workload.recipe.peak_lr
        assert given.max_steps == workload.recipe.steps
