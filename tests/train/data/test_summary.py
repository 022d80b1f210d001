"""The summary of prepared data, as ``shoal data prepare`` prints it."""

import json

import pytest

from shoal.cli.main import app


@pytest.fixture
def printed(capsys, tmp_path):
    def call(*given):
        capsys.readouterr()
        code = app(
            [
                "data",
                "prepare",
                *(word for one in (*given, f"data.cache={tmp_path / 'cache'}") for word in ("--set", one)),
            ],
            result_action="return_value",
        )
        assert code == 0
        return capsys.readouterr().out

    return call


def test_numbers_are_those_of_the_rows(printed, tmp_path):
    texts = ["a" * (1 + number % 10) for number in range(50)]
    rows = [json.dumps({"text": text}) for text in texts] + ["{broken", json.dumps({"body": "x"})]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    out = printed(f"data.source={tmp_path / 'a.jsonl'}", "recipe.seq=8", "recipe.batch=4", "recipe.steps=30")
    tokens = sum(len(text) + 1 for text in texts)
    assert f"50 documents, {tokens} tokens, the longest has 11" in out
    assert "duplicates: 40 documents" in out
    assert "quarantined: 2 rows (broken JSON: 1, no field 'text': 1)" in out
    samples = int(out.split(" samples:")[0].rpartition("\n")[2])
    assert f"30 steps are {120 / samples:.3g} epochs" in out


def test_parts_and_validation_sets_are_listed(printed, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    mix = f'data.mix=[{{source="{tmp_path}/a.txt"}}, {{source="{tmp_path}/b.txt"}}]'
    given = (
        mix,
        f"evaluate.source={tmp_path / 'c.txt'}",
        "recipe.seq=8",
        "recipe.batch=4",
        "recipe.epochs=2",
    )
    out = printed(*given)
    assert [line.partition(":")[0].rpartition("/")[2] for line in out.splitlines() if "longest" in line] == [
        "a.txt",
        "b.txt",
        "validation",
    ]
    assert "epochs" in out
