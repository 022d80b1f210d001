"""Words of other tools: each answered with Shoal's own, and never with one that only looks alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.facts.cluster import devices, notation
from shoal.facts.config import Config, find_field
from shoal.facts.config.check import _keys
from shoal.facts.config.file import load
from shoal.facts.input.foreign_terms import KEYS, LATER, LAYOUT, SENTENCES, VALUES, meaning
from shoal.facts.layout import READERS, Layout
from shoal.facts.problem import BadInput


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(BadInput) as caught:
        load(None, list(overrides))
    return {problem.what: problem.fix for problem in caught.value.problems}


def test_every_answer_is_a_key_that_there_is() -> None:
    assert all(find_field(key) is not None for key in KEYS.values())
    assert set(LAYOUT.values()) <= READERS.keys()
    assert not KEYS.keys() & LAYOUT.keys() and not (KEYS.keys() | LAYOUT.keys()) & SENTENCES.keys()
    # Otherwise a key of ours would be called another tool's.
    ours = {*_keys(Config), *(key.rpartition(".")[2] for key in _keys(Config)), *READERS}
    assert not ours & (KEYS.keys() | LAYOUT.keys() | SENTENCES.keys())


def test_what_is_promised_for_later_is_not_there_yet() -> None:
    assert not [key for key in LATER if find_field(key) is not None]


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("recipe.learning_rate", "recipe.lr"),
        ("learning_rate", "recipe.lr"),
        ("data.path", "data.source"),
        ("save_steps", "checkpoint.every"),
        ("checkpoint.save_steps", "checkpoint.every"),
        ("recipe.micro_batch_size", 'layout = "micro=4"'),
        ("per_device_train_batch_size", 'layout = "micro=4"'),
        ("gradient_accumulation_steps", "recipe.batch = dp · fsdp · micro · accumulation"),
        ("max_steps", "recipe.steps"),
        ("warmup_steps", "recipe.warmup"),
        ("lr_scheduler_type", "recipe.schedule"),
        ("run.weight_decay", "recipe.weight_decay"),
        ("max_grad_norm", "recipe.clip"),
        ("bf16", 'recipe.precision = "bf16"'),
        ("gradient_checkpointing", 'layout = "recompute=full"'),
        ("zero_stage", 'layout = "zero=…"'),  # 4 is no stage
        ("tensor_model_parallel_size", 'layout = "tp=4"'),
        ("pipeline_model_parallel_size", 'layout = "pp=4"'),
        ("context_parallel_size", 'layout = "cp=4"'),
        ("data_parallel_shard_degree", 'layout = "fsdp=4"'),
        ("tp", 'layout = "tp=4"'),
        ("global_batch_size", "recipe.batch"),
        ("seq_length", "recipe.seq"),
        ("max-seq-length", "recipe.seq"),
        ("output_dir", "run.dir"),
        ("logging_steps", "metrics.jsonl"),
        ("eval_steps", "evaluate.every"),
        ("save_total_limit", "checkpoint.keep"),
        ("dataset", "data.source"),
        ("tokenizer", "data.tokenizer"),
        ("model_name_or_path", "model.init_from"),
        ("num_train_epochs", "recipe.epochs"),
    ],
)
def test_a_word_of_another_tool_is_answered_with_ours(written: str, answer: str) -> None:
    ((what, fix),) = problems(f"{written}=4").items()
    assert written in what and answer in fix


def test_what_comes_later_is_answered_with_what_to_write_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is promised at the time: a promise that is made up."""
    monkeypatch.setattr("shoal.facts.config.check.LATER", {"tune.later": "write it by hand"})
    (fix,) = problems("tune.later=3").values()
    assert fix == "not yet: write it by hand"


def test_a_table_of_another_tool_is_answered_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        "[training]\nseq_len = 8\nsteps = 3\n[parallelism]\ntensor_parallel_degree = 2\n[odd]\nx = 1\n"
    )
    with pytest.raises(BadInput) as caught:
        load(path)
    found = [(problem.what.removeprefix(f"{path}:"), problem.fix) for problem in caught.value.problems]
    assert [what for what, _ in found] == [
        "2: unknown key 'training.seq_len'",
        "3: unknown key 'training.steps'",
        "5: unknown key 'parallelism.tensor_parallel_degree'",
        "6: unknown key 'odd'",
    ]
    assert [
        word in fix
        for word, (_, fix) in zip(["recipe.seq", "recipe.steps", "tp=2", "known: "], found, strict=True)
    ]


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("ddp=2", "dp=2"),
        ("dp_replicate=2", "dp=2"),
        ("dp_shard=4", "fsdp=4"),
        ("dp_shard=-1", "fsdp=…"),
        ("tensor=2", "tp=2"),
        ("pipeline=4", "pp=4"),
        ("ac=full", "recompute=full"),
        ("ac=true", "recompute=full"),
        ("ac=selective", "recompute=selective"),
        ("zero_stage=2", "zero=2"),
        ("pp_schedule=Interleaved1F1B", "schedule=interleaved"),
        ("schedule=ZBVZeroBubble", "schedule=zbv"),
        ("schedule=1F1B", "schedule=1f1b"),
        ("cp_kind=a2a", "cp_kind=ulysses"),
    ],
)
def test_a_layout_in_other_words_is_answered_with_the_pair_to_write(written: str, answer: str) -> None:
    with pytest.raises(BadInput) as caught:
        Layout.parse(written)
    assert [problem.fix for problem in caught.value.problems] == [answer]
    if "…" not in answer:
        Layout.parse(answer)


def test_a_layout_has_no_keys_of_the_recipe() -> None:
    with pytest.raises(BadInput) as caught:
        Layout.parse("batch=8 mp=2 gas=4")
    fixes = [problem.fix for problem in caught.value.problems]
    assert (
        "recipe.batch" in fixes[0]
        and "tp=N" in fixes[1]
        and "pp=N" in fixes[1]
        and "accumulation" in fixes[2]
    )


def test_a_layout_as_a_table_is_shown_as_text() -> None:
    assert problems("layout.tp=2") == {'--set: layout: must be text, in "quotes"': 'layout = "tp=2"'}


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ('recipe.precision="bfloat16"', 'recipe.precision = "bf16"'),
        ('recipe.precision="16-mixed"', 'recipe.precision = "fp16"'),
        ('recipe.optimizer="adamw_torch"', 'recipe.optimizer = "adamw"'),
    ],
)
def test_a_value_of_another_tool_is_answered_with_ours(written: str, answer: str) -> None:
    assert list(problems(written).values()) == [answer]


def test_values_are_those_of_a_layout_or_a_config() -> None:
    known = {"none", "selective", "full", "ring", "ulysses", "interleaved", "zb", "zbv"}
    known |= {"bf16", "fp16", "fp32", "fp64", "adamw", "constant", "linear", "cosine", "wsd"}
    assert set(VALUES.values()) == known


@pytest.mark.parametrize("name", ["P100", "A10", "K80", "L40", "RTX2080", "MI250", "Gaudi2"])
def test_a_device_that_the_catalogue_lacks_is_described_not_replaced(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        notation.find(f"8x{name}")
    (problem,) = caught.value.problems
    assert "not in the catalogue" in problem.what and "did you mean" not in problem.fix
    # What the answer tells to write down is a cluster.
    line = problem.fix[problem.fix.index("device = ") : problem.fix.index("; known: ")]
    path = tmp_path / "cluster.toml"
    path.write_text(line)
    assert notation.find(str(path)).device.name == name


def test_a_variant_of_a_device_is_answered_with_those_that_there_are() -> None:
    _, fix = devices.unknown("H100-CNX")
    assert "H100, H100-96GB, H100-PCIe, H100-NVL; or describe it" in fix


def test_words_are_found_as_keys_and_as_flags() -> None:
    assert meaning("--max-seq-length") == meaning("max_seq_length") == meaning("training.MAX_SEQ_LENGTH")
    assert meaning("rhubarb") is None


# Files.


def refusal(path: Path) -> tuple[str, str]:
    with pytest.raises(BadInput) as caught:
        load(path)
    (problem,) = caught.value.problems
    return problem.what, problem.fix


@pytest.mark.parametrize(
    ("name", "content", "what", "fix"),
    [
        (
            "ds_config.json",
            {"zero_optimization": {"stage": 2}},
            "a DeepSpeed config",
            "shoal init my-run.toml --from",
        ),
        ("ds.json", {"bf16": {"enabled": True}}, "a DeepSpeed config", "shoal init my-run.toml --from"),
        (
            "args.json",
            {"output_dir": "x", "learning_rate": 5e-5, "bf16": True, "num_train_epochs": 3},
            "TrainingArguments",
            "learning_rate is recipe.lr",
        ),
        ("config.json", {"model_type": "llama"}, "config.json of a model", "--set model.path="),
        ("any.json", {"a": 1}, "is not valid TOML", "a config is a TOML file"),
    ],
)
def test_another_tools_json_is_named(name: str, content: object, what: str, fix: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    found = refusal(path)
    assert what in found[0] and fix in found[1]


@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n",
            "accelerate config",
            "shoal init my-run.toml",
        ),
        (
            "parallelism:\n  dp: 2\ntokens:\n  sequence_length: 64\n",
            "another tool's",
            "sequence_length is recipe.seq",
        ),
    ],
)
def test_another_tools_yaml_is_named(content: str, what: str, fix: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    found = refusal(path)
    assert what in found[0] and fix in found[1]


def test_a_directory_is_named(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)[0]
    (tmp_path / "my.toml").touch()
    assert "my.toml" in refusal(tmp_path)[1]
    (tmp_path / "config.json").write_text("{}")
    assert "a model's directory" in refusal(tmp_path)[0]
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.jsonl").touch()
    what, fix = refusal(tmp_path)
    assert "a run's directory" in what and fix == f"shoal train {tmp_path}/config.toml --run {tmp_path}"
