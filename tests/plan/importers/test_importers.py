"""DeepSpeed's and Accelerate's files read into Shoal's words, and what is said about the rest."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.plan.exporting import ask

from shoal.facts.config import Config
from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.plan import importers
from shoal.plan.commented import commented
from shoal.plan.export import export

BATCHES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}


def read_foreign(
    path: Path, gpus: int | None = None, on: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The tables of a config, and the notes."""
    found = importers.read_foreign(path, gpus, on)
    return found.tables, found.notes


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """A file of settings: JSON, or YAML, of which JSON is a part."""

    def write(settings: Any, name: str = "ds_config.json") -> Path:
        path = tmp_path / name
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings), encoding="utf-8")
        return path

    return write


def accelerate(**settings: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", **settings}


# There and back.


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("dp=8,micro=2", {}),
        ("fsdp=8,zero=1,micro=2", {"schedule": "linear", "states": "bf16"}),
        ("fsdp=8,zero=2,micro=2,offload=optimizer", {"schedule": "constant", "warmup": 7}),
        ("fsdp=8,micro=2,recompute=full,offload=optimizer:0.5@nvme+params+activations", {"lr_min": 0.1}),
        ("fsdp=4,zero=2,tp=2,sp=0,micro=2", {"precision": "fp16"}),
        ("fsdp=4,cp=2,cp_kind=ulysses,micro=2", {"optimizer": "sgd", "momentum": 0.5, "reduce": "bf16"}),
        ("dp=8,micro=2", {"precision": "fp32", "warmup": 0}),
        ("dp=8,micro=2", {"schedule": "linear", "warmup": 0, "clip": 0.0}),
    ],
)
def test_what_deepspeed_can_say_comes_back(file: Any, layout: str, recipe: dict[str, Any]) -> None:
    # Steps are in its schedules alone, and a constant one has none.
    workload = ask(layout, batch=64, steps=300, **{"warmup": 15, **recipe})
    tables, notes = read_foreign(file(export("deepspeed", workload).files["ds_config.json"]))
    assert tables["layout"] == layout
    read = Config.model_validate(tables)
    not_there = {"seq", "seed"}
    assert read.recipe.model_dump(exclude=not_there) == workload.recipe.model_dump(exclude=not_there)
    assert read.tune == workload.tune
    assert not [note for note in notes if "no counterpart" in note]


@pytest.mark.parametrize(
    "layout",
    [
        "dp=8",
        "fsdp=8",
        "dp=2,fsdp=4",
        "fsdp=4,tp=2",
        "fsdp=4,cp=2",
        "fsdp=8,recompute=full,offload=optimizer+params",
        "fsdp=8,zero=2,micro=64",
        "fsdp=4,cp=2,cp_kind=ulysses,micro=64",
    ],
)
def test_what_accelerate_can_say_comes_back(tmp_path: Path, layout: str) -> None:
    for name, text in export("accelerate", ask(layout)).files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tables, notes = read_foreign(tmp_path / "accelerate.yaml")
    assert tables["layout"] == layout
    assert tables["recipe"]["precision"] == "bf16"
    assert not [note for note in notes if "no counterpart" in note]


# DeepSpeed.


def test_a_file_full_of_auto(file: Any) -> None:
    """The kind that Hugging Face's Trainer is given."""
    path = file(
        {
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9},
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "steps_per_print": 2000,
        }
    )
    tables, notes = read_foreign(path, gpus=8)
    assert tables["layout"] == "fsdp=8"
    assert tables["recipe"]["batch"] == 16
    # The script's to decide is not the same as left out, which means DeepSpeed's own default.
    assert not {"lr", "beta2", "weight_decay"} & tables["recipe"].keys()
    assert tables["recipe"]["eps"] == 1e-8
    said = "\n".join(notes)
    for key in (
        "bf16.enabled",
        "optimizer.params.lr",
        "zero_optimization.reduce_bucket_size",
        "train_batch_size",
    ):
        assert f'{key} = "auto"' in said
    assert "steps_per_print = 2000: no counterpart" in said
    assert "sub_group_size = 1000000000.0: no counterpart" in said


@pytest.mark.parametrize(
    ("settings", "gpus", "on", "layout", "batch"),
    [
        (BATCHES, None, None, "dp=8,micro=2", 64),
        ({"train_batch_size": 64}, 4, None, "dp=4", 64),
        ({"train_micro_batch_size_per_gpu": 2}, 4, None, "dp=4,micro=2", 8),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            4,
            None,
            "dp=4,micro=2",
            24,
        ),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, None, "8xH100", "dp=8,micro=2", 64),
        ({**BATCHES, "tensor_parallel": {"autotp_size": 2}}, None, None, "dp=8,tp=2,sp=0,micro=2", 64),
        ({**BATCHES, "tensor_parallel": {"autotp_size": 2}}, 16, None, "dp=8,tp=2,sp=0,micro=2", 64),
    ],
)
def test_ranks_and_batch(
    file: Any, settings: dict[str, Any], gpus: int | None, on: str | None, layout: str, batch: int
) -> None:
    tables, _ = read_foreign(file(settings), gpus, on)
    assert (tables["layout"], tables["recipe"]["batch"]) == (layout, batch)
    assert tables.get("cluster") == ({"on": on} if on else None)


def test_older_and_rarer_settings(file: Any) -> None:
    zero = {"stage": 3, "mics_shard_size": 4, "overlap_comm": False, "stage3_prefetch_bucket_size": 0}
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
    optimizer = {"type": "Lion", "params": {"lr": "1e-4"}}
    settings = {**BATCHES, "zero_optimization": zero, "scheduler": scheduler, "optimizer": optimizer}
    tables, notes = read_foreign(file({**settings, "gradient_clipping": 0.5}))
    assert tables["layout"] == "dp=2,fsdp=4,micro=2"
    assert tables["tune"] == {"prefetch": 0}
    recipe = tables["recipe"]
    assert (recipe["lr"], recipe["lr_min"], recipe["clip"], recipe["warmup"]) == (1e-4, 1e-4, 0.5, 2)
    said = "\n".join(notes)
    for part in ("optimizer Lion: no counterpart", "overlap_comm = false", "along a logarithm"):
        assert part in said
    offloaded = {**BATCHES, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert read_foreign(file(offloaded))[0]["layout"] == "fsdp=8,zero=2,micro=2,offload=optimizer"


def test_gradients_are_summed_as_there(file: Any) -> None:
    """Without a word on it DeepSpeed sums in the precision of the computation."""
    tables, _ = read_foreign(file({**BATCHES, "bf16": {"enabled": True}}))
    assert tables["recipe"]["reduce"] == "bf16"
    assert tables["recipe"]["clip"] == 0.0


# Accelerate.


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({"distributed_type": "MULTI_GPU"}, "dp=8"),
        ({"distributed_type": "NO"}, "dp=1"),
        ({}, "fsdp=8"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, "fsdp=8,zero=2"),
        ({"fsdp_config": {"fsdp_sharding_strategy": 1}}, "fsdp=8"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, "dp=8"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "num_machines": 2}, "dp=2,fsdp=4"),
        ({"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}, "fsdp=8,zero=2"),
        ({"fsdp_config": {"fsdp_offload_params": "true"}}, "fsdp=8,offload=optimizer+params"),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
            },
            "fsdp=8,zero=2,offload=optimizer",
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4},
            },
            "fsdp=8,zero=2,micro=1",
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": {
                    "megatron_lm_tp_degree": 2,
                    "megatron_lm_pp_degree": 2,
                    "megatron_lm_use_distributed_optimizer": True,
                    "megatron_lm_recompute_activations": True,
                },
            },
            "fsdp=2,zero=1,tp=2,pp=2,recompute=selective",
        ),
    ],
)
def test_accelerate_settings(file: Any, settings: dict[str, Any], layout: str) -> None:
    tables, _ = read_foreign(file(accelerate(**settings), "accelerate.yaml"))
    assert tables["layout"] == layout


def test_accelerate_on_cpu_and_compiled(file: Any) -> None:
    given = accelerate(
        distributed_type="MULTI_CPU", use_cpu=True, dynamo_config={"dynamo_backend": "INDUCTOR"}
    )
    tables, notes = read_foreign(file(given, "accelerate.yml"))
    assert tables["cluster"] == {"on": "8xcpu"}
    assert tables["compile"] == {"enabled": True}
    assert "optimizer, learning rate and schedule are the script's" in "\n".join(notes)


def test_what_it_says_of_gaps(file: Any) -> None:
    given = accelerate(
        fsdp_config={"fsdp_backward_prefetch": "BACKWARD_PRE"}, downcast_bf16="no", debug=False
    )
    _, notes = read_foreign(file(given, "accelerate.yaml"))
    assert [note for note in notes if "no counterpart" in note] == [
        "fsdp_config.fsdp_backward_prefetch = 'BACKWARD_PRE': no counterpart, left out"
    ]


def test_without_pyyaml_it_says_how_to_get_it(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BadInput) as caught:
        read_foreign(file(accelerate(), "accelerate.yaml"))
    assert "pip install pyyaml" in str(caught.value)


# Bad input.


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("{", "a.json", "is not valid JSON"),
        ("a: [", "a.yaml", "is not valid YAML"),
        ("[1]", "a.json", "not a table of settings"),
        ("{}", "a.json", "is not a config of any stack"),
        ('{"lr": 1}', "a.json", "is not a config of any stack"),
        (json.dumps({"train_batch_size": 8}), "a.json", "does not say how many ranks"),
        (json.dumps({**BATCHES, "train_batch_size": "many"}), "a.json", "must be a number"),
        (json.dumps({**BATCHES, "train_batch_size": 2.5}), "a.json", "must be a whole number"),
        (json.dumps({**BATCHES, "train_batch_size": 10**400}), "a.json", "must be a number"),
        (json.dumps({**BATCHES, "train_batch_size": 60}), "a.json", "60 does not divide by 8"),
        (
            json.dumps({**BATCHES, "train_micro_batch_size_per_gpu": 0}),
            "a.json",
            "does not say how many ranks",
        ),
        (json.dumps({**BATCHES, "zero_optimization": {"stage": 4}}), "a.json", "zero = 4"),
        (json.dumps({**BATCHES, "bf16": {"enabled": 3}}), "a.json", "must be true or false"),
        (json.dumps({**BATCHES, "optimizer": {"type": "Adam", "params": {"lr": -1}}}), "a.json", "recipe.lr"),
        (
            json.dumps({**BATCHES, "optimizer": {"type": "Adam", "params": {"betas": [1]}}}),
            "a.json",
            "2 numbers",
        ),
        (json.dumps(accelerate(distributed_type="XLA")), "a.yaml", "'XLA' has no counterpart"),
        (json.dumps(accelerate(num_processes=-1)), "a.yaml", "num_processes is missing"),
        (
            json.dumps(
                accelerate(
                    distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "no.json"}
                )
            ),
            "a.yaml",
            "there is no file",
        ),
    ],
)
def test_bad_files(file: Any, text: str, name: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_foreign(file(text, name))
    assert said in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)


def test_everything_wrong_is_said_at_once(file: Any) -> None:
    settings = {**BATCHES, "train_batch_size": "x", "gradient_clipping": [], "bf16": {"enabled": 3}}
    with pytest.raises(BadInput) as caught:
        read_foreign(file(settings))
    keys = ("bf16.enabled", "gradient_clipping", "train_batch_size")
    assert len(caught.value.problems) == 3
    assert all(key in problem.what for key, problem in zip(keys, caught.value.problems, strict=True))


def test_numbers_that_contradict_one_another(file: Any) -> None:
    with pytest.raises(BadInput, match="is not micro-batch 2 · accumulation 4 · 4 data ranks") as caught:
        read_foreign(file(BATCHES), gpus=4)
    assert "an accumulation of 8, or 32 as the batch" in str(caught.value)
    with pytest.raises(BadInput, match="--gpus 0"):
        read_foreign(file(BATCHES), gpus=0)
    with pytest.raises(BadInput, match="there is no file"):
        read_foreign(Path("nowhere.json"))


# The config that is written.


def test_the_config_is_complete_and_loads(file: Any, tmp_path: Path) -> None:
    settings = {**BATCHES, "zero_optimization": {"stage": 3}, "custom": "two\nlines # and a mark"}
    tables, notes = read_foreign(file(settings), on="8xH100")
    text = commented(tables, ["read from ds\nconfig.json", *(f"- {note}" for note in notes)])
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    loaded = load(path).config
    assert loaded.layout == "fsdp=8,micro=2"
    assert loaded.cluster.on == "8xH100"
    expected = Config.model_validate({**tables, "run": {"name": "run"}})
    assert loaded == expected
    assert text.count("\n# - ") == len(notes)
    for key in ("preset", "source", "bucket_mb"):
        assert f"# {key} = " in text
