"""Every export of every kind of layout: files that parse, the right number of ranks, and honest gaps."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tests.plan.exporting import ask, questions, written_by

from shoal.facts.config import Lora
from shoal.facts.layout.legality import violations
from shoal.facts.problem import BadInput
from shoal.plan.export import STACKS, export
from shoal.plan.export.shared import BLOCKS, machines, without_pipeline
from shoal.plan.export.trainer import arguments
from shoal.predict.workload import Workload

QUESTIONS = questions()
PAIRS = [(one, stack) for one in QUESTIONS for stack in STACKS if written_by(stack, one)]


def name(one: Workload | str) -> str:
    return one if isinstance(one, str) else f"{one.model.name} {one.layout}"


@pytest.mark.parametrize("workload", QUESTIONS, ids=name)
def test_the_questions_are_legal(workload: Workload) -> None:
    assert violations(workload.layout, workload.model, workload.recipe, workload.cluster) == []


@pytest.mark.parametrize(("workload", "stack"), PAIRS, ids=name)
def test_files_parse_and_gaps_name_what_is_nearest(workload: Workload, stack: str) -> None:
    exported = export(stack, workload)
    assert exported.files and exported.command
    for file, text in exported.files.items():
        parse(file, text)
    for gap in exported.cannot:
        assert "nearest: " in gap and "\n" not in gap
    assert len(set(exported.cannot)) == len(exported.cannot)


def parse(file: str, text: str) -> object:
    suffix = Path(file).suffix
    if suffix == ".json":
        return json.loads(text)
    if suffix == ".yaml":
        return yaml.safe_load(text)
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".py":
        return ast.parse(text)
    assert suffix == ".sh"
    return subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(("workload", "stack"), [pair for pair in PAIRS if pair[1] != "sagemaker"], ids=name)
def test_the_command_starts_every_rank(workload: Workload, stack: str) -> None:
    exported = export(stack, workload)
    if stack == "accelerate":
        settings = yaml.safe_load(exported.files["accelerate.yaml"])
        assert settings["num_processes"] == workload.layout.world
        assert settings["num_machines"] == machines(workload)[0]
        return
    text = exported.files["megatron.sh"] if stack == "megatron" else exported.command
    nodes = re.search(r"--(?:nnodes|num_nodes) (\d+)", text)
    each = re.search(r"--(?:nproc-per-node|num_gpus) (\d+)", text)
    assert each is not None
    assert (int(nodes[1]) if nodes else 1) * int(each[1]) == workload.layout.world


def test_torchtitan_is_not_given_another_model() -> None:
    with pytest.raises(BadInput) as caught:
        export("torchtitan", ask("fsdp=8", model="llama2-70b"))
    assert "no model of llama2-70b's shape" in str(caught.value) and "llama3 70B" in str(caught.value)


def test_an_unknown_stack_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput) as caught:
        export("deepsped", ask("dp=8"))
    assert "did you mean 'deepspeed'?" in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "on", "expected"),
    [
        ("dp=8", "8xH100", (1, 8)),
        ("dp=4", "4xcpu", (1, 4)),
        ("dp=16", "16xH100", (2, 8)),
        ("dp=6", "6x1xH100", (6, 1)),
        ("dp=4", "8xH100", (1, 4)),
        ("dp=12", "16xH100", (3, 4)),
    ],
)
def test_machines(layout: str, on: str, expected: tuple[int, int]) -> None:
    assert machines(ask(layout, on=on, batch=48)) == expected


def test_a_pipeline_folds_into_ranks_that_shard() -> None:
    folded, notes = without_pipeline(ask("fsdp=2,tp=2,pp=4,micro=2", batch=32))
    assert str(folded.layout) == "fsdp=8,tp=2,micro=2"
    assert folded.recipe.batch == 32 and len(notes) == 1
    # A batch that the wider group cannot share becomes the nearest that it can.
    folded, notes = without_pipeline(ask("fsdp=2,pp=4,micro=1", batch=20))
    assert (str(folded.layout), folded.recipe.batch) == ("fsdp=8,micro=1", 16)
    assert "nearest: 16" in notes[1]
    assert folded.accumulation * folded.micro * folded.layout.data_ranks == folded.recipe.batch


def test_lora_is_mentioned_wherever_it_is_lost() -> None:
    for stack in STACKS:
        exported = export(stack, ask("dp=8", lora=Lora(rank=4)))
        assert any("lora of rank 4" in gap for gap in exported.cannot), stack


def transformers_source(*place: str) -> str:
    """Read and not imported, which would take seconds."""
    found = find_spec("transformers")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent.joinpath(*place).read_text("utf-8")


@pytest.mark.parametrize(("family", "block"), BLOCKS.items())
def test_block_classes_are_those_of_transformers(family: str, block: str) -> None:
    folder = family.removesuffix("_text")  # where its text model is, beside the one that reads images
    assert f"class {block}(" in transformers_source("models", folder, f"modeling_{folder}.py")


def test_trainer_arguments_exist() -> None:
    source = transformers_source("training_args.py")
    for workload in QUESTIONS:
        for field in arguments(workload):
            assert re.search(rf"^    {field}: ", source, re.MULTILINE), field
