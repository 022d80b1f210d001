"""Exported files loaded by the parsers of the stacks they are for, in folders that are thrown away.

Nothing is installed into Shoal's own environment: a package lies in a folder of its own, in front of it on the path,
and uses the environment's torch. Megatron-LM's arguments are in no package, and NeMo's classes import what only a GPU
has; what their wheels hold is checked instead, and the row says so.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Packages to install without their dependencies (torch is there), and what proves a file.
PACKAGES = {
    "accelerate": (["accelerate"], "load_config_from_file, ParallelismConfig"),
    "deepspeed": (["deepspeed", "hjson", "einops", "msgpack", "py-cpuinfo", "psutil"], "DeepSpeedConfig"),
    "torchtitan": (
        [
            *("torchtitan", "tyro", "docstring-parser", "shtab", "typeguard", "rich", "triton", "einops"),
            *(
                "spmd_types==0.2.3",
                "torchdata",
                "torch_checkpointing",
                "datasets<4.8",
                "dill",
                "multiprocess",
            ),
            *("xxhash", "pyarrow", "pandas", "python-dateutil", "six", "httpx", "tensorboard", "protobuf"),
            "absl-py",
        ],
        "ConfigManager and its checks; fp8 needs torchao, which is not here",
    ),
    "megatron": (
        ["megatron-core"],
        "PipelineParallelLayerLayout; names of arguments are held by a unit test",
    ),
    "megatron-bridge": (
        ["megatron-bridge", "megatron-core"],
        "keywords against the classes' source, not imported",
    ),
    "nemo": (["nemo-toolkit==2.4.1", "megatron-core"], "keywords against the classes' source, not imported"),
    "sagemaker": (
        ["sagemaker"],
        "ModelTrainer's parts: SMP, Torchrun, Compute, SourceCode; the image's address",
    ),
}
WITH_DEPENDENCIES = ("sagemaker",)  # it uses nothing of ours

Check = Callable[[Path, int], None]


def main() -> None:
    """Install, export and load for every stack; one row each."""
    from record import record

    with tempfile.TemporaryDirectory() as folder:
        exported = write_all(Path(folder) / "exported")
        for stack, (packages, by) in PACKAGES.items():
            place = Path(folder) / stack
            install(packages, place, dependencies=stack in WITH_DEPENDENCIES)
            versions = {
                each.metadata["Name"].lower(): each.version for each in distributions(path=[str(place)])
            }
            failures = load_all(stack, exported / stack, place)
            record(
                "exports",
                stack=stack,
                package=packages[0].partition("==")[0],
                version=versions[packages[0].partition("==")[0]],
                by=by,
                files=len(list((exported / stack).iterdir())),
                failures=failures,
            )


def write_all(folder: Path) -> Path:
    """Every question's files, a folder each, with its world beside them."""
    sys.path.insert(0, str(ROOT))  # for the questions that the tests are asked
    from tests.plan.exporting import questions

    from shoal.plan.export import STACKS, export

    for number, workload in enumerate(questions()):
        for stack in STACKS:
            place = folder / stack / f"{number:02}"
            place.mkdir(parents=True)
            for name, text in export(stack, workload).files.items():
                (place / name).write_text(text, encoding="utf-8")
            (place / "world").write_text(str(workload.layout.world), encoding="utf-8")
    return folder


def install(packages: list[str], place: Path, dependencies: bool) -> None:
    command = [sys.executable, "-m", "pip", "install", "-qq", "--target", str(place), *packages]
    command += [] if dependencies else ["--no-deps", "--no-build-isolation"]
    subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"}, stderr=subprocess.DEVNULL)


def load_all(stack: str, exported: Path, place: Path) -> list[str]:
    """What the stack's own code refused, by a process that sees its packages."""
    environment = {**os.environ, "PYTHONPATH": str(place), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, __file__, stack, str(exported), str(place)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = ended.stdout.strip().splitlines()[-1:]
    if ended.returncode or not last:
        return [ended.stderr.strip().splitlines()[-1]]
    failures: list[str] = json.loads(last[0])
    return failures


def check(stack: str, exported: Path, place: Path) -> None:
    """In that process: load every file, and print what was refused."""
    load = CHECKS[stack](place)
    failures = []
    for folder in sorted(exported.iterdir()):
        try:
            load(folder, int((folder / "world").read_text("utf-8")))
        except Exception as error:  # whatever a foreign parser raises is a finding
            failures.append(f"{folder.name}: {type(error).__name__}: {error}")
    print(json.dumps(failures))


def expect(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)


def accelerate(place: Path) -> Check:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig

    def load(folder: Path, world: int) -> None:
        config = load_config_from_file(str(folder / "accelerate.yaml"))
        expect(config.num_processes == world, "num_processes")
        sizes = {
            name.removeprefix("parallelism_config_"): size for name, size in config.parallelism_config.items()
        }
        if sizes:
            degrees = ParallelismConfig(
                **{name: size for name, size in sizes.items() if name.endswith("_size")}
            )
            expect(degrees.total_size == world, "total_size")

    return load


def deepspeed(place: Path) -> Check:
    from deepspeed.runtime import config as deepspeed_config

    deepspeed_config.dist.get_rank = lambda: 0  # it asks, though there is no process group

    def load(folder: Path, world: int) -> None:
        settings = json.loads((folder / "ds_config.json").read_text("utf-8"))
        each = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"]

        class Ranks:
            @staticmethod
            def get_data_parallel_world_size() -> int:
                return int(settings["train_batch_size"] // each)

        loaded = deepspeed_config.DeepSpeedConfig(settings, mpu=Ranks)
        expect(loaded.zero_optimization_stage == settings["zero_optimization"]["stage"], "stage")
        expect(not loaded.zero_config.model_extra, "a key of zero_optimization that it does not know")

    return load


def torchtitan(place: Path) -> Check:
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config import ConfigManager

    def load(folder: Path, world: int) -> None:
        text = (folder / "torchtitan_config.py").read_text("utf-8")
        if "Float8" in text:
            return  # its converter asks for torchao as it is made
        name = f"exported_{folder.name}"  # a module is imported once
        (place / f"{name}.py").write_text(text, encoding="utf-8")
        config = ConfigManager().parse_args(["--module", name, "--config", "run"])
        axes = config.parallelism
        get_schedule_class(axes.pipeline_parallel_schedule)
        ranks = axes.data_parallel_replicate_degree * axes.data_parallel_shard_degree
        inner = axes.tensor_parallel_degree * axes.context_parallel_degree * axes.pipeline_parallel_degree
        expect(ranks * inner == world, "world size")

    return load


def megatron(place: Path) -> Check:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    def load(folder: Path, world: int) -> None:
        script = (folder / "megatron.sh").read_text("utf-8")
        words = shlex.split(script[script.index("ARGUMENTS=(") + len("ARGUMENTS=(") : script.index("\n)\n")])
        given = dict(pairwise(words))
        inner = [
            int(given[f"--{axis}-parallel-size"]) for axis in ("tensor-model", "context", "pipeline-model")
        ]
        expect(world % (inner[0] * inner[1] * inner[2]) == 0, "world size")
        if stages := given.get("--pipeline-model-parallel-layout"):
            layout = PipelineParallelLayerLayout(stages, inner[2])
            layout.validate_layer_layout(int(given["--num-layers"]), None)

    return load


def nemo(place: Path) -> Check:
    """NeMo imports Transformer Engine; so its classes' source is read, with that of the core they extend."""
    sources = [
        "nemo/lightning/pytorch/strategies/megatron_strategy.py",
        "nemo/lightning/pytorch/plugins/mixed_precision.py",
        "nemo/lightning/pytorch/optim/lr_scheduler.py",
        "nemo/lightning/pytorch/optim/megatron.py",
        "nemo/collections/llm/gpt/data/mock.py",
        "nemo/collections/llm/gpt/model/base.py",
        "nemo/collections/llm/gpt/model/llama.py",
        "nemo/collections/llm/gpt/model/deepseek.py",
        *CORE,
    ]
    return by_source([place / source for source in sources], "nemo_run.py")


def bridge(place: Path) -> Check:
    """So does Megatron-Bridge."""
    parts = ["training/config.py", "training/comm_overlap.py", "training/mixed_precision.py"]
    parts += ["models/gpt_provider.py", "models/mla_provider.py", "models/transformer_config.py"]
    parts += ["training/tokenizers/config.py"]
    core = [place / source for source in CORE]
    return by_source([*core, *(place / "megatron" / "bridge" / part for part in parts)], "bridge_run.py")


CORE = (
    "megatron/core/distributed/distributed_data_parallel_config.py",
    "megatron/core/optimizer/optimizer_config.py",
    "megatron/core/transformer/transformer_config.py",
    "megatron/core/model_parallel_config.py",
    "megatron/core/datasets/gpt_dataset.py",
    "megatron/core/datasets/blended_megatron_dataset_config.py",
)


def by_source(sources: list[Path], file: str) -> Check:
    """Every keyword of a script is a field or an argument of the class that it is given to, or of those it extends."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for source in sources:
        for node in ast.parse(source.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def accepted(name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
        """Bridge's classes extend the core's of the same name, which they import under another."""
        for node in classes.get(name, ()):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    yield from (argument.arg for argument in (*part.args.args, *part.args.kwonlyargs))
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield part.target.id
            for base in node.bases:
                plain = ast.unparse(base).partition("[")[0].rpartition(".")[2].removeprefix("MCore")
                if plain != name and plain not in seen:
                    yield from accepted(plain, seen | {name})

    def load(folder: Path, world: int) -> None:
        for node in ast.walk(ast.parse((folder / file).read_text("utf-8"))):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in classes:
                unknown = {word.arg or "" for word in node.keywords} - set(accepted(name))
                expect(not unknown, f"{name} takes no {sorted(unknown)}")

    return load


def sagemaker(place: Path) -> Check:
    import runpy

    from sagemaker.core import image_uris
    from sagemaker.train import configs, distributed

    made = {"SMP": distributed.SMP, "Compute": configs.Compute, "SourceCode": configs.SourceCode}

    def load(folder: Path, world: int) -> None:
        path = folder / "sagemaker_job.py"
        expect(callable(runpy.run_path(str(path))["trainer"]), "a trainer")
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        given: dict[str, Any] = {}
        for call in calls:
            name = ast.unparse(call.func)
            if name in made:
                keywords = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
                given |= keywords
                made[name](**keywords)
            if name == "image_uris.retrieve":
                first, _ = call.args
                words = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
                image_uris.retrieve(ast.literal_eval(first), "us-west-2", **words)
        expect(given["instance_count"] == -(-world // 8), "instance_count")

    return load


CHECKS: dict[str, Callable[[Path], Check]] = {
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "megatron-bridge": bridge,
    "nemo": nemo,
    "sagemaker": sagemaker,
}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
