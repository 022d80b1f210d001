"""From a config to a job: the layout chosen, and everything wrong with it at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.plan.planning import answered

from shoal.facts.cluster import notation
from shoal.facts.config import Config
from shoal.facts.config.file import load
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput
from shoal.plan.resolve import Job, choose, resolve


def config(**tables: Any) -> Config:
    return Config.model_validate({"cluster": {"on": "4xcpu"}, **tables})


def problems(**tables: Any) -> dict[str, str]:
    with pytest.raises(BadInput) as caught:
        resolve(config(**tables))
    return {problem.what: problem.fix for problem in caught.value.problems}


def test_the_default_on_this_machine() -> None:
    job = resolve(Config(), visible="")
    assert isinstance(job, Job)
    assert job.model == PRESETS["tiny"]
    assert job.cluster.name == "local"
    assert str(job.layout) == "dp=1"


@pytest.mark.parametrize(
    ("cluster", "batch", "chosen"),
    [
        ("4xcpu", 16, "dp=4"),
        ("8xcpu", 12, "dp=6"),  # the most of them that the batch divides over
        ("8xcpu", 7, "dp=7"),
        ("4xcpu", 7, "dp=1"),
        ("8xH100", 16, "dp=8"),
    ],
)
def test_auto_is_a_replica_on_every_device(cluster: str, batch: int, chosen: str) -> None:
    written = config(cluster={"on": cluster}, recipe={"batch": batch})
    assert str(resolve(written).layout) == chosen
    assert choose(written, notation.find(cluster)) == resolve(written).layout


def test_auto_on_a_named_cluster_uses_all_of_it_also_where_the_batch_does_not_divide() -> None:
    """The plan says which batch would let every device be a data rank."""
    job = resolve(config(cluster={"on": "8xH100"}, recipe={"batch": 12}))
    assert job.layout.world == 8 and 12 % job.layout.data_ranks == 0
    found = answered("tiny", "8xH100", 128, 12, precision="fp32")
    assert str(job.layout) == found.as_json()["chosen"]["layout"]
    assert any(
        "The batch of 12 does not divide evenly over the 8 GPUs" in reason and "a batch of 16 (" in reason
        for reason in found.decision.reasons
    )


def test_auto_where_nothing_fits_is_refused_and_says_what_to_do() -> None:
    found = problems(
        model={"preset": "llama3-405b"},
        cluster={"on": "1xH100"},
        recipe={"seq": 4096, "batch": 64, "precision": "bf16"},
    )
    assert found == {
        "layout: auto: no layout that the engine runs is predicted to fit 1xH100": (
            "shoal plan llama3-405b --on 1xH100 --seq 4096 --batch 64 says what would; "
            "a layout that you name is tried in any case"
        )
    }


def test_a_layout_that_was_written_is_taken() -> None:
    job = resolve(config(layout="dp=2,micro=4"))
    assert str(job.layout) == "dp=2,micro=4"


def test_a_model_from_a_directory_called_like_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    shallow = PRESETS["tiny"].model_copy(update={"layers": 3})
    Path("tiny/config.json").write_text(json.dumps(write_config(shallow)), encoding="utf-8")
    assert resolve(config(model={"path": "tiny"})).model.layers == 3
    assert resolve(config(model={"preset": "tiny"})).model.layers == 8


def test_problems_of_several_sources_come_together() -> None:
    found = problems(
        layout="dp=3,tp=3,cp=2",
        run={"strict": True},
        model={"preset": "mixtral-8x7b", "lora": {}},
        evaluate={"ema": True},
        recipe={"precision": "fp8"},
    )
    said = "\n".join(found)
    for part in (
        'recipe.precision = "fp8" with the experts of mixtral-8x7b: this version of Shoal does not train with it',
        "model.lora",
        "evaluate.ema without recipe.ema",
        'recipe.precision = "fp8"',
        "batch=16 does not divide by dp·fsdp·micro = 3·1 = 3",
        "tp=3 does not divide the 32 attention heads of mixtral-8x7b",
        "run.strict: tp=3 sums in a different order",
    ):
        assert part in said
    assert all(found.values())


def test_layouts_that_are_named_are_run() -> None:
    found = problems(layout="dp=3,cp=3", run={"strict": True})
    assert found["layout dp=3,cp=3,micro=1 is not legal here"] == (
        "nearest legal layouts: dp=4,micro=1; dp=2,micro=1; dp=8,micro=1"
    )
    for layout in ("dp=4,micro=1", "dp=2,micro=1", "dp=8,micro=1"):
        assert str(resolve(config(layout=layout, run={"strict": True})).layout) == layout


def test_strict_works_on_one_sequence_at_a_time() -> None:
    assert str(resolve(config(layout="dp=2", run={"strict": True})).layout) == "dp=2,micro=1"
    assert "run.strict works on one sequence at a time; micro=2" in problems(
        layout="micro=2", run={"strict": True}
    )


def test_an_unknown_model_and_cluster_do_not_hide_the_rest() -> None:
    found = problems(
        model={"preset": "tinny"},
        cluster={"on": "8xH1000"},
        evaluate={"ema": True},
        layout="dp=3",
    )
    said = "\n".join(found)
    for part in (
        "'tinny' is neither a preset",
        "the device 'H1000' is not in the catalogue",
        "evaluate.ema without recipe.ema",
    ):
        assert part in said
    # Without a cluster nothing is said of a layout that we would have had to choose.
    (only,) = problems(cluster={"on": "8xH1000"})
    assert only == "cluster.on: '8xH1000': the device 'H1000' is not in the catalogue"


@pytest.mark.parametrize(
    ("tables", "what", "fix"),
    [
        ({"recipe": {"states": "int8", "optimizer": "lion"}}, "recipe.states", 'recipe.states = "bf16"'),
        ({"evaluate": {"ema": True}}, "evaluate.ema", "recipe.ema = 0.999"),
    ],
)
def test_what_the_engine_does_not_run_is_refused_before_anything_starts(
    tables: dict[str, Any], what: str, fix: str
) -> None:
    ((said, advice),) = problems(**tables).items()
    assert said.startswith(what)
    assert fix in advice


@pytest.mark.parametrize(
    ("cluster", "precision", "told"), [("1xH100", "fp8", 0), ("1xcpu", "fp8", 0), ("1xA100-80GB", "bf16", 1)]
)
def test_fp8_is_bf16_on_devices_without_it_and_that_is_said(cluster: str, precision: str, told: int) -> None:
    settings = ["recipe.precision=fp8", f"cluster.on={cluster}", "model.preset=llama3.2-1b", "recipe.seq=256"]
    job = resolve(load(None, settings, "dp=1").config)
    assert job.config.recipe.precision == precision
    assert len(job.notes) == told and all("does not multiply in fp8" in note for note in job.notes)


def test_a_layout_for_pairs_keeps_them_together() -> None:
    """Chosen, or unset and filling a pipeline: two sequences are never parted."""
    settings = ["recipe.loss=dpo", "data.format=preference", "recipe.batch=12", "recipe.precision=bf16"]
    on = ["cluster.on=8xH100", "model.preset=llama3-8b", "recipe.seq=2048"]
    chosen = resolve(load(None, [*settings, *on]).config).layout
    assert chosen.world == 8 and chosen.micro_batch(12) % 2 == 0 == 12 % (2 * chosen.data_ranks)
    tiny = resolve(load(None, [*settings, "cluster.on=8xcpu"], "pp=8").config).layout
    assert tiny.micro == 2
