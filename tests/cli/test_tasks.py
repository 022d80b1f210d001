"""``shoal evaluate --tasks``: lm-eval's numbers for a run, held against ``transformers`` on the exported weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Train
from tests.docs.shown import words_of

from shoal.cli.main import main

Output = pytest.CaptureFixture[str]

ROWS = [
    {"question": "one two three", "choices": [" four", " zzz"], "answer": 0},
    {"question": "a b c", "choices": [" 0", " d", " e f"], "answer": 1},
    {"question": "words", "choices": [" and more", " or none of it"], "answer": 1},
]
CHOICE = """
task: shoal_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: shoal_text
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list: [{metric: byte_perplexity}]
"""
WRITTEN = """
task: shoal_written
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


def shoal(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.system  # lm-eval is among what make test-system installs
def test_tasks_of_a_run_equal_those_of_its_export_in_transformers(
    train: Train, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    names = []
    for name, text in (("choice", CHOICE), ("text", ROLLING), ("written", WRITTEN)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text % rows, encoding="utf-8")
        names.append(path)
    run = train("run", recipe__steps=3)
    capsys.readouterr()
    typed = words_of("docs/huggingface.md", "shoal evaluate runs/NAME --tasks")
    ours_for = {"runs/NAME": run.directory.path, "hellaswag": names[0], "my_task.yaml": names[1]}
    asked = [ours_for.get(word, word) for word in typed[1:]]
    assert shoal(*asked, "--tasks", names[2], "--json") == 0
    ours = json.loads(capsys.readouterr().out)["tasks"]
    assert set(ours) == {"shoal_choice", "shoal_text", "shoal_written"}
    assert shoal("checkpoint", "export", run.directory.path, "--to", "hf", tmp_path / "hf") == 0
    arguments = {"pretrained": str(tmp_path / "hf"), "device": "cpu", "dtype": "float32"}
    theirs: Any = lm_eval.simple_evaluate("hf", arguments, tasks=list(map(str, names)), bootstrap_iters=0)
    for name, metrics in ours.items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert value == pytest.approx(theirs["results"][name][metric], rel=1e-5), (name, metric)
    every_answer_is_theirs(run.directory.path, tmp_path / "hf")
    capsys.readouterr()
    assert shoal("evaluate", run.directory.path, "--tasks", names[0], "--samples", 2) == 0
    assert capsys.readouterr().out.split()[:3] == ["task", "metric", "value"]
    assert shoal("evaluate", run.directory.path, "--tasks", tmp_path / "none.yaml") == 2
    assert shoal("evaluate", run.directory.path, "--tasks", names[0], "--layout", "tp=2") == 2


def every_answer_is_theirs(run: Path, exported: Path) -> None:
    """What a metric rounds off: each sum of log-probabilities, and the text itself, to the letter."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from shoal.launch.evaluate import job_for
    from shoal.launch.init_rank import init_rank
    from shoal.train.harness import HarnessModel

    job, place, _ = job_for(str(run), "dp=1", [], None)
    ours, theirs = (
        HarnessModel(job, init_rank(job, 0, 0, None), place),
        HFLM(pretrained=str(exported), device="cpu", dtype="float32"),
    )
    assert ours.longest == theirs.max_length
    long = "one two three four " * 100  # more than the network takes

    def asked(kind: Any, *arguments: Any) -> list[Instance]:
        return [Instance(kind, {}, one, at) for at, one in enumerate(arguments)]

    pairs = asked("loglikelihood", ("one two", " three"), ("", "a b"), ("a ", "b"), (long, "end"))
    texts = asked("loglikelihood_rolling", ("one two three",), (long,))
    written = asked(
        "generate_until", *(("one two", {"until": [stop], "max_gen_toks": 24}) for stop in ("e", "\0"))
    )
    # In this order and once more: a cache that was filled while writing must not be there when scoring.
    for _ in range(2):
        for mine, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
            assert mine[0] == pytest.approx(other[0], rel=1e-4) and mine[1] == other[1]
        assert ours.loglikelihood_rolling(texts) == pytest.approx(
            theirs.loglikelihood_rolling(texts), rel=1e-4
        )
        assert ours.generate_until(written) == theirs.generate_until(written)
    assert len(ours.generate_until(written)[1]) > 4


def test_without_lm_eval_one_line_says_so(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.tasks.find_spec", lambda name: None)
    assert shoal("evaluate", tmp_path, "--tasks", "hellaswag") == 2
    assert (
        "--tasks needs lm-eval, which is not installed\n  fix: pip install lm_eval" in capsys.readouterr().err
    )
    assert shoal("evaluate", tmp_path, "--tasks", "hellaswag", "--data", "a=b") == 2
