"""Config files: what overrides what, where each value came from, and what a person is told about a wrong one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.config import Config, MixPart
from shoal.facts.config.file import Loaded, flatten, load, template, write
from shoal.facts.problem import BadInput, Problem

File = Callable[[str], Path]


@pytest.fixture
def file(tmp_path: Path) -> File:
    """``file(text)``: a config file that holds it."""

    def write_file(text: str) -> Path:
        path = tmp_path / "my-run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def problems(*arguments: Any, **named: Any) -> list[Problem]:
    with pytest.raises(BadInput) as caught:
        load(*arguments, **named)
    return list(caught.value.problems)


def only(*arguments: Any, **named: Any) -> Problem:
    (problem,) = problems(*arguments, **named)
    return problem


def changed(loaded: Loaded) -> dict[str, Any]:
    """Every value that was given, with where."""
    return {key: (flatten(loaded.config).get(key), place) for key, place in loaded.origins.items()}


# What is read


def test_nothing_and_an_empty_file_are_the_default(file: File) -> None:
    assert load(None).config == Config()
    assert load(None).origins == {}
    path = file("")
    loaded = load(path)
    # Two configs side by side do not share a directory.
    assert loaded.config.run.name == "my-run"
    assert loaded.origins == {"run.name": f"the name of {path}"}
    assert load(path, ["run.name=default"]).config == Config()


def test_every_way_to_write_a_key_has_its_place(file: File) -> None:
    path = file(
        'layout = "tp=2 dp=2"\n'
        'run.name = "x"\n'
        "\n"
        "[recipe]\n"
        "lr = 1 # an integer will do\n"
        '"batch" = 8\n'
        "[model]\n"
        "lora = {rank = 3,\n"
        ' targets = ["a"]}\n'.replace(",\n", ",")
    )
    loaded = load(path)
    assert changed(loaded) == {
        "layout": ("dp=2,tp=2", f"{path}:1"),
        "run.name": ("x", f"{path}:2"),
        "recipe.lr": (1.0, f"{path}:5"),
        "recipe.batch": (8, f"{path}:6"),
        "model.lora.rank": (3, f"{path}:8"),
        "model.lora.targets": (["a"], f"{path}:8"),
    }
    assert loaded.origin("recipe.lr") == f"{path}:5"
    assert loaded.origin("recipe.seq") == "default"
    assert loaded.origin("model.lora.alpha") == "default"


def test_a_byte_order_mark_and_windows_lines_are_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[recipe]\r\nseq = 8\r\n")
    assert changed(load(path))["recipe.seq"] == (8, f"{path}:2")


# What overrides what


def test_layout_beats_set_beats_the_file(file: File) -> None:
    path = file('layout = "dp=2"\n[recipe]\nlr = 0.1\nseq = 8\n')
    loaded = load(path, ["layout=dp=4", "recipe.lr=0.2"], "dp=8")
    assert changed(loaded) == {
        "layout": ("dp=8", "--layout"),
        "recipe.lr": (0.2, "--set"),
        "recipe.seq": (8, f"{path}:4"),
        "run.name": ("my-run", f"the name of {path}"),
    }
    assert load(path, ["layout=dp=4"]).config.layout == "dp=4"
    assert load(path, ["recipe.lr=0.2", "recipe.lr=0.3"]).config.recipe.lr == 0.3


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("recipe.lr=1e-4", 1e-4),
        ("recipe.lr=3", 3.0),
        ("recipe.lr = 3", 3.0),
        ("recipe.seq=1_024", 1024),
        ("recipe.precision=bf16", "bf16"),
        ('recipe.precision="bf16"', "bf16"),
        ("recipe.warmup=5%", "5%"),
        ('recipe.warmup="5%"', "5%"),
        ("recipe.warmup=100", 100),
        ("recipe.warmup=0.5", 0.5),
        ("recipe.tokens=15T", 15 * 10**12),
        ("recipe.tokens=15e12", 15 * 10**12),
        ("run.strict=true", True),
        ("run.name=007", "007"),
        ("run.name=true", "true"),
        ("run.name=[1, 2]", "[1, 2]"),
        ("run.name=a=b", "a=b"),
        ("run.name= spaced ", " spaced "),
        ('run.name="quoted"', '"quoted"'),
        ("model.path=1.5", str(Path.cwd() / "1.5")),
        ("data.end_token=0", "0"),
        ("cluster.on=8xH100", "8xH100"),
        ("layout=fsdp=4,tp=2", "fsdp=4,tp=2"),
        ("model.lora.rank=8", 8),
        ('model.lora.targets=["q_proj"]', ["q_proj"]),
        ('data.mix=[{source="a", weight=1}]', [MixPart(source=str(Path.cwd() / "a"), weight=1.0)]),
    ],
)
def test_set(override: str, value: Any) -> None:
    key = override.partition("=")[0].strip()
    loaded = load(None, [override])
    assert flatten(loaded.config)[key] == value
    assert type(flatten(loaded.config)[key]) is type(value)
    assert loaded.origin(key) == "--set"


def test_set_of_a_whole_table_replaces_it(file: File) -> None:
    path = file("[recipe]\nlr = 0.1\nseq = 8\n[model.lora]\nrank = 2\n")
    loaded = load(path, ["recipe={lr=0.2}", "model.lora={alpha=1}"])
    assert loaded.config.recipe.seq == Config().recipe.seq
    assert loaded.origin("recipe.lr") == loaded.origin("model.lora.alpha") == "--set"
    assert loaded.origin("recipe.seq") == loaded.origin("model.lora.rank") == "default"
    # The name of the run is the file's also then.
    assert load(path, ['run={dir="elsewhere"}']).config.run.name == "my-run"


def test_set_to_nothing_takes_back_what_may_be_none(file: File) -> None:
    path = file('[model]\npath = "x"\nlora = {rank = 3}\n[recipe]\ntokens = "1M"\n')
    loaded = load(path, ["model.path=", "model.lora=", "recipe.tokens=", "model.init_from="])
    assert loaded.config == load(None, ["run.name=my-run"]).config
    assert loaded.origin("model.path") == "default"
    assert only(None, ["run.name="]).what == '--set: run.name = "": must not be empty'


def test_the_last_word_on_the_length_of_a_run(file: File) -> None:
    by_tokens = file('[recipe]\ntokens = "1M"\n')
    loaded = load(by_tokens)
    assert loaded.config.recipe.steps == 489
    assert loaded.origin("recipe.steps") == "recipe.tokens"
    short = load(by_tokens, ["recipe.steps=3"])
    assert (short.config.recipe.steps, short.config.recipe.tokens) == (3, None)
    assert (short.origin("recipe.steps"), short.origin("recipe.tokens")) == ("--set", "default")
    assert load(by_tokens, ["recipe={steps=3}"]).config.recipe.steps == 3
    by_steps = file("[recipe]\nsteps = 10\n")
    assert load(by_steps, ["recipe.tokens=4k"]).config.recipe.steps == 2
    contradiction = file('[recipe]\nsteps = 10\ntokens = "1M"\n')
    assert "steps = 10 and tokens = 1M disagree" in only(contradiction).what
    assert only(contradiction).fix == "keep one: recipe.steps or recipe.tokens"
    assert "disagree" in only(None, ["recipe.steps=1", "recipe.tokens=1M"]).what


# What is written


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.init_from=models/x", "model.path=models/x", "data.end_token=</s>"],
        ["model.lora.rank=3", 'model.lora.targets=["a", "b"]'],
        ["recipe.tokens=15T", "recipe.lr_reference_batch=8", "recipe.warmup=10"],
        ['data.mix=[{source="a", weight=0.5}, {source="b", weight=2}]'],
        ['run.name=line\n"quoted" \\ ünï\t', "layout=tp=2 dp=4"],
        ["recipe.warmup=0.1", "recipe.decay=5%", "recipe.lr=3e-7"],
    ],
)
def test_a_written_config_reads_back_equal(overrides: list[str], file: File) -> None:
    config = load(None, overrides).config
    assert load(file(write(config))).config == config


@given(st.text(min_size=1))
def test_any_text_survives(text: str) -> None:
    config = Config.model_validate({"run": {"name": text}})
    assert Config.model_validate(tomllib.loads(write(config))) == config


def test_the_template_is_the_default_commented_out() -> None:
    text = template()
    assert Config.model_validate(tomllib.loads(text)) == Config()
    uncommented = tomllib.loads(re.sub(r"^# (\w+ = [^ #])", r"\1", text, flags=re.MULTILINE))
    assert Config.model_validate(uncommented) == Config()
    given = {key for key, value in flatten(Config()).items() if value is not None}
    assert set(flatten(uncommented)) == given
    # Keys without a default are shown too, and everything says what it means.
    assert "# init_from =" in text
    assert not [line for line in text.splitlines() if line.startswith("# ") and line.count("#") < 2][1:]


# What is refused


def test_files_that_cannot_be_read(tmp_path: Path, file: File) -> None:
    missing = only(tmp_path / "missing.toml")
    assert (missing.what, missing.fix) == (
        f"there is no config file {tmp_path / 'missing.toml'}",
        "shoal init writes one",
    )
    assert only(tmp_path).what == f"{tmp_path} is a directory, not a Shoal config"
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# caf\xe9\n")
    assert only(latin).what == f"{latin} is not UTF-8: byte 5 is 0xe9"
    for broken in ("name = my run", "a = ", "[x", "a = 1\na = 2", "x = " + "9" * 5000, "x = " + "[" * 5000):
        problem = only(file(broken))
        assert "is not valid TOML: " in problem.what
        assert problem.fix


@pytest.mark.parametrize(
    ("text", "line", "key", "fix"),
    [
        ("stepz = 3", 1, "stepz", "did you mean 'recipe.steps'?"),
        ("steps = 3", 1, "steps", "did you mean 'recipe.steps'?"),
        ("\n[recipes]\nlr = 1", 2, "recipes", "did you mean 'recipe'?"),
        ("recipes.lr = 1", 1, "recipes", "did you mean 'recipe'?"),
        ("[recipe]\n\nlearning_rate = 1", 3, "recipe.learning_rate", "it is recipe.lr here"),
        ("recipe.sead = 1", 1, "recipe.sead", "did you mean 'recipe.seed'?"),
        ("recipe = {sead = 1}", 1, "recipe.sead", "did you mean 'recipe.seed'?"),
        ("[run]\nlr = 1", 2, "run.lr", "did you mean 'recipe.lr'?"),
        ("[run]\nevery = 1", 2, "run.every", "did you mean 'evaluate.every' or 'checkpoint.every'?"),
        ("[model]\nrank = 1", 2, "model.rank", "did you mean 'model.lora.rank'?"),
        ("lora = {}", 1, "lora", "did you mean 'model.lora'?"),
        ("[model.lora]\nrang = 1", 2, "model.lora.rang", "did you mean 'model.lora.rank'?"),
        ("[run]\nSTRICT = true", 2, "run.STRICT", "did you mean 'run.strict'?"),
        ('[run]\n"na me" = 1', 2, "run.na me", "did you mean 'run.name'?"),
        ("[[mix]]\nsource = 1", 1, "mix", "did you mean 'data.mix'?"),
    ],
)
def test_unknown_keys(text: str, line: int, key: str, fix: str, file: File) -> None:
    path = file(text)
    problem = only(path)
    assert problem.what == f"{path}:{line}: unknown key {key!r}"
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("text", "line", "said", "fix"),
    [
        ("run = 3", 1, "run = 3: must be a table", "[run] holds name, dir, strict"),
        ("layout = 3", 1, 'layout = 3: must be text, in "quotes"', 'layout: "auto" or'),
        ("[layout]\ndp = 3", 1, 'layout: must be text, in "quotes"', 'layout = "dp=3"'),
        (
            "[recipe.seq]\nx = 1",
            1,
            "recipe.seq: must be a whole number",
            "recipe.seq: tokens per sequence (default 128)",
        ),
        ('[recipe]\nseq = "a"', 2, 'recipe.seq = "a": must be a whole number', "tokens per sequence"),
        ("[recipe]\nseq = 1.5", 2, "recipe.seq = 1.5: must be a whole number", "tokens per sequence"),
        ("[recipe]\nseq = true", 2, "recipe.seq = true: must be a whole number", "tokens per sequence"),
        ("[recipe]\nseq = 0", 2, "recipe.seq = 0: must be at least 1", "tokens per sequence"),
        ("[recipe]\nlr = 0", 2, "recipe.lr = 0: must be above 0", "(default 0.01)"),
        ("[recipe]\nlr = inf", 2, "recipe.lr = inf: must be a finite number", "peak learning rate"),
        ("[recipe]\nlr = 1979-05-27", 2, "recipe.lr = 1979-05-27: must be a number", "peak learning rate"),
        ("[recipe]\nlr_min = 2", 2, "recipe.lr_min = 2: must be at most 1.0", "as a fraction of lr"),
        ("[recipe]\nbeta1 = 1", 2, "recipe.beta1 = 1: must be below 1.0", "AdamW"),
        ("run.strict = 5", 1, "run.strict = 5: must be true or false", "run.strict: bit-identical"),
        ("run.name = 5", 1, 'run.name = 5: must be text, in "quotes"', "free text"),
        ('run.name = ""', 1, 'run.name = "": must not be empty', "free text"),
        ('[recipe]\nprecision = "bf-16"', 2, "must be one of 'fp32', 'bf16'", 'recipe.precision = "bf16"'),
        (
            '[recipe]\noptimizer = "lamb"',
            2,
            "must be one of 'adamw', 'sgd', 'lion', 'adafactor' or 'muon'",
            'recipe.optimizer: "adamw", "sgd", "lion", "adafactor" or "muon"',
        ),
        ("[recipe]\nprecision = 16", 2, "recipe.precision = 16: must be one of", "compute precision"),
        (
            '[recipe]\nwarmup = "soon"',
            2,
            'must be steps (100), a share (0.05) or a percentage ("5%")',
            "steps (100)",
        ),
        ("[recipe]\nwarmup = true", 2, "recipe.warmup = true: has a type that it cannot have", "steps (100)"),
        ("[recipe]\nwarmup = -5", 2, "recipe.warmup = -5: must not be negative", "steps (100)"),
        ('[recipe]\ntokens = "lots"', 2, "'lots' is not a whole count such as 15T", "length of the run"),
        (
            "model.lora = 3",
            1,
            "model.lora = 3: must be a table",
            "[model.lora] holds kind, rank, alpha, dropout, targets",
        ),
        ("[model]\nlora = {rank = 0}", 2, "model.lora.rank = 0: must be at least 1", "rank of the adapters"),
        ("model.lora.targets = 'q'", 1, 'model.lora.targets = "q": must be a list', "projections"),
        ("model.lora.targets = []", 1, "model.lora.targets = []: must not be empty", "projections"),
        ("model.lora.targets = ['q', 1]", 1, "model.lora.targets.1 = 1: must be text", "config show"),
        (
            "[[data.mix]]\nsource = 'a'\n[[data.mix]]\nsource = []",
            4,
            'data.mix.1.source = []: must be text, in "quotes"',
            "data.mix.1.source: as data.source",
        ),
        ("[[data.mix]]\nweight = 1", 1, "data.mix.0: the key 'source' is missing", "source: as data.source"),
        (
            '[evaluate]\nwatch = "third"\nsource = {second = "b"}',
            1,
            'watch = "third" is no validation set',
            'evaluate.watch = "heldout" or "second"',
        ),
        (
            "[[data.mix]]\nsource = 'a'\n[[data.mix]]\nsorce = 'b'\nsource = 'b'",
            4,
            "data.mix.1: unknown key 'sorce'",
            "did you mean 'source'?",
        ),
        (
            "[[recipe.groups]]\nmatch = '*'\nlearning_rate = 1e-4",
            3,
            "recipe.groups.0: unknown key 'learning_rate'",
            "did you mean 'lr'?",
        ),
        (
            "[[recipe.groups]]\nmatch = '*'\nlr = 'fast'",
            3,
            'recipe.groups.0.lr = "fast": must be a number',
            "recipe.groups.0.lr: ",
        ),
        ("[[run]]\nname = 'a'", 1, 'run = [{name = "a"}]: must be a table', "[run] holds"),
        ("run.name = 1" + "0" * 400, 1, "run.name = 1" + "0" * 58 + "…: must be", "free text"),
        ("recipe.lr = 1" + "0" * 400, 1, "recipe.lr", "peak learning rate"),
    ],
)
def test_wrong_values(text: str, line: int, said: str, fix: str, file: File) -> None:
    path = file(text)
    problem = only(path)
    assert problem.what.startswith(f"{path}:{line}: ")
    assert said in problem.what
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("override", "said", "fix"),
    [
        ("recipe.lr", "--set recipe.lr: it is not KEY=VALUE", "--set recipe.lr=0.001"),
        ("=3", "--set =3: it is not KEY=VALUE", "--set recipe.lr=0.001"),
        ("", "--set : it is not KEY=VALUE", "--set recipe.lr=0.001"),
        ("nothing.at.all=3", "--set: unknown key 'nothing'", "known: "),
        ("lr=3", "--set: unknown key 'lr'", "did you mean 'recipe.lr'?"),
        ("recipe.lr.x=3", "--set: recipe.lr: must be a number", "peak learning rate"),
        ("recipe..lr=3", "--set: unknown key 'recipe.'", "known: "),
        ("recipe.seq=abc", '--set: recipe.seq = "abc": must be a whole number', "tokens per sequence"),
        ("recipe.seq=", '--set: recipe.seq = "": must be a whole number', "tokens per sequence"),
        ("recipe.seq=1\nbatch = 2", '--set: recipe.seq = "1\\nbatch = 2": must be', "tokens per sequence"),
        ("recipe=3", "--set: recipe = 3: must be a table", "[recipe] holds seq, batch"),
        ("recipe.seq=" + "[" * 5000, "--set: recipe.seq", "tokens per sequence"),
        ("run.name=\udcff", "--set: run.name", "free text"),
        ("layout=dp=0", "--set: layout: dp=0: must be", "dp=1 or more"),
    ],
)
def test_wrong_overrides(override: str, said: str, fix: str) -> None:
    problem = only(None, [override])
    assert said in problem.what
    assert fix in problem.fix


def test_set_through_a_value(file: File) -> None:
    problem = only(file("[recipe]\nlr = 3"), ["recipe.lr.x=3"])
    what = "--set recipe.lr.x=…: recipe.lr is a value, not a table"
    assert problem == Problem(what, "--set recipe.lr=…", "--set recipe.lr.x")


def test_everything_wrong_is_reported_at_once(file: File) -> None:
    path = file('layout = "dp=0"\nstepz = 3\n[recipe]\nseq = "a"\nsead = 1\n[run]\nname = 1\n')
    said = [problem.what for problem in problems(path, ["nonsense", "tune.prefetch=-1"], "dp=x,foo=2")]
    assert said == [
        "--set nonsense: it is not KEY=VALUE",
        f"{path}:2: unknown key 'stepz'",
        f"{path}:5: unknown key 'recipe.sead'",
        "--layout: dp=x: must be a whole number from 1 to 1000000000",
        "--layout: unknown key 'foo'",
        f'{path}:7: run.name = 1: must be text, in "quotes"',
        f'{path}:4: recipe.seq = "a": must be a whole number',
        "--set: tune.prefetch = -1: must be at least 0",
    ]


def test_shares_of_the_data_are_checked_together() -> None:
    with pytest.raises(BadInput) as caught:
        load(None, ["data.heldout=1.0", "data.max_bad_rows=-1"])
    assert len(caught.value.problems) == 2
