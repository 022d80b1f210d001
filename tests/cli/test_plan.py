"""``shoal plan`` as a person and as a script meet it: the table and its JSON, files written or refused, no torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.report.test_report import PageReader

from shoal.cli.main import main
from shoal.facts.config.file import load
from shoal.plan.export import STACKS
from shoal.plan.resolve import resolve

Capture = pytest.CaptureFixture[str]
SMALL = ("llama3.2-1b", "--on", "2xH100", "--seq", "1024", "--batch", "4")


def plan(capsys: Capture, *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    return ended.value.code, *capsys.readouterr()


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code, out, _ = plan(capsys, *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_document_has_every_field_that_is_promised(capsys: Capture) -> None:
    found = document(capsys, *SMALL, "--top", "3", "--tokens", "1B", "--price", "2")
    promised = {"model", "cluster", "recipe", "plans", "chosen", "rejected", "searched", "proven", "seconds"}
    assert promised <= found.keys()
    assert {"how_many", "deadline", "budget", "affordable", "compute_optimal", "measurement"} <= found.keys()
    assert {"goodput", "kwh", "tokens_per_day", "training_seconds", "days"} <= found["plans"][0][
        "cost"
    ].keys()
    assert found["proven"] is True  # so small a space is searched to its end
    best = found["plans"][0]
    of_a_plan = """layout degrees world fits memory step tokens_per_s_per_gpu model_tflops_per_gpu mfu vs_ddp traffic
        error_bar support command why"""
    assert set(of_a_plan.split()) <= best.keys()
    spent = dict(best["step"])
    assert spent.pop("seconds") == pytest.approx(sum(spent.values()))
    held = ("params", "grads", "optimizer", "activations", "logits", "buffers")
    assert sum(best["memory"][name] for name in held) == best["memory"]["peak_allocated"]
    times = [one["step"]["seconds"] for one in found["plans"]]
    assert times == sorted(times) and all(one["fits"] for one in found["plans"])
    assert best["cost"]["cost"] == pytest.approx(2 * best["cost"]["gpu_hours"])
    assert best["why"] and len(found["rejected"]) <= 20
    assert found["recipe"]["precision"] == "bf16" and found["recipe"]["optimizer"] == "adamw"


def test_adapters_in_four_bits_and_with_lengths(capsys: Capture) -> None:
    asked = (*SMALL[:1], "--on", "1xH100", *SMALL[3:], "--layout", "micro=1", "--lora", "8")
    plain, quantised = (document(capsys, *asked, *more) for more in ((), ("--nf4", "--dora")))
    assert quantised["lora"]["base"] == "nf4" and quantised["lora"]["kind"] == "dora"
    ours, theirs = (one["plans"][0] for one in (quantised, plain))
    assert ours["memory"]["params"] < 0.7 * theirs["memory"]["params"]
    assert " --lora 8 --dora --nf4 " in ours["command"]


def test_every_number_of_the_table_is_in_the_document(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")  # nothing is wrapped
    found = document(capsys, *SMALL, "--top", "3")
    _, shown, _ = plan(capsys, *SMALL, "--top", "3")
    assert found["decision"]["text"] in shown
    assert all(reason in shown for reason in found["decision"]["reasons"])
    assert found["proven"] and f"proven best of {found['searched']:,} layouts" in shown
    for one in found["plans"]:
        rows = [line for line in shown.splitlines() if line.endswith(f"  {one['layout']}")]
        row = rows[-1]  # above it are the three answers
        sizes = [
            f"{one['memory'][name] / 2**30:.1f}" for name in ("peak_allocated", "device_p90", "capacity")
        ]
        numbers = [
            f"{one['step']['seconds']:.4g} ± {one['error_bar']:.0%}",
            f"{one['tokens_per_s_per_gpu']:,.0f}",
            f"{one['mfu']:.1%}",
            f"{one['vs_ddp']:.2f}",
        ]
        assert f"{sizes[0]} … {sizes[1]} of {sizes[2]}" in row
        assert all(number in row for number in numbers) and one["binds"] in row


def test_one_layout_is_judged_alone_also_where_it_does_not_fit(capsys: Capture) -> None:
    found = document(capsys, "llama3-8b", *SMALL[1:], "--layout", "dp=2")
    (only,) = found["plans"]
    assert only["layout"] == "dp=2" and not only["fits"] and found["searched"] == 1
    assert found["proven"] is False  # nothing else was looked at
    assert found["remedies"] and "does not fit" in found["decision"]["text"]
    assert all(remedy["device_p90"] <= remedy["capacity"] for remedy in found["remedies"])


def test_an_illegal_layout_is_refused_with_all_reasons_and_the_nearest(capsys: Capture) -> None:
    code, out, err = plan(capsys, *SMALL, "--layout", "dp=3,tp=5")
    assert code == 2 and out == ""
    assert err.count("error: ") >= 3 and "nearest legal layouts: " in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lama3-8b", *SMALL[1:]], ["'lama3-8b' is neither a preset"]),
        ([*SMALL, "--layout", "tpp=2"], ["unknown key 'tpp'"]),
        ([*SMALL, "--tokens", "many"], ["--tokens: 'many'"]),
        ([*SMALL, "--price", "2"], ["--price needs the length"]),
        ([*SMALL, "--top", "0"], ["--top 0"]),
        ([*SMALL, "--export", "deepsped", "--save", "x.toml"], ["--export deepsped"]),
        ([*SMALL, "--precision", "bf61"], ['recipe.precision = "bf61"', 'recipe.precision = "bf16"']),
        ([*SMALL, "--nf4", "--dora"], ["--lora 16 --nf4", "--lora 16 --dora"]),
        ([*SMALL, "--lora", "0", "--tokens", "0", "--states", "fp4"], ["--lora 0", "--tokens 0", "states"]),
        (
            ["tiny", "--on", "2xH1000", *SMALL[3:]],
            ["--on: '2xH1000': the device 'H1000' is not in the catalogue"],
        ),
        ([*SMALL, "--html", "no/such/page.html"], ["there is no directory no/such"]),
        ([*SMALL, "--export", "deepspeed", "--to", "no/such"], ["--to no/such: there is no directory no"]),
        ([*SMALL, "--export", "deepspeed", "--to", __file__], [f"--to {__file__}: it is not a directory"]),
        (["gpt2", *SMALL[1:3], "--seq", "4096", "--batch", "4"], ["learned positions"]),
        (
            [*SMALL, "--layout", "dp=2,offload=activations", "--save", "x.toml"],
            ["offload=activations with recompute=none"],
        ),
        (["--on", "2xH100"], ["MODEL"]),
    ],
)
def test_bad_input_writes_nothing(
    arguments: list[str], said: list[str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = plan(capsys, *arguments, "--json")
    assert code == 2
    told = [text for problem in json.loads(out)["problems"] for text in problem.values() if text]
    assert all(words in err and any(words in text for text in told) for words in said), err
    assert "  fix: " in err and list(tmp_path.iterdir()) == []


def test_what_is_saved_can_be_trained(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    code, out, _ = plan(capsys, *SMALL, "--tokens", "1B", "--save", str(path))
    assert code == 0 and f"wrote {path}; then: shoal train" in out
    job = resolve(load(path).config)
    assert job.model.name == "llama3.2-1b" and str(job.cluster) == "2xH100" and job.layout.world == 2
    assert (job.config.recipe.batch, job.config.recipe.seq, job.config.recipe.precision) == (4, 1024, "bf16")
    assert job.config.recipe.steps == -(-(10**9) // 4096)
    before = path.read_text()
    code, out, err = plan(capsys, *SMALL, "--save", str(path))
    assert code == 2 and "exists" in err and path.read_text() == before
    code, _, _ = plan(capsys, *SMALL, "--save", str(path), "--force", "--layout", "fsdp=2,recompute=full")
    assert code == 0 and 'layout = "fsdp=2,recompute=full"' in path.read_text()


def test_an_export_is_written_with_its_command(capsys: Capture, tmp_path: Path) -> None:
    found = document(
        capsys, *SMALL, "--layout", "fsdp=2,zero=2", "--export", "deepspeed", "--to", str(tmp_path)
    )
    assert found["export"]["command"].startswith("deepspeed ")
    assert [Path(path).exists() for path in found["written"]] == [True] * len(list(tmp_path.iterdir()))
    (config,) = tmp_path.glob("*.json")
    assert json.loads(config.read_text())["zero_optimization"]["stage"] == 2


CONFIG = {
    "model_type": "llama",
    **{"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512},
    **{"vocab_size": 512, "max_position_embeddings": 1024},
}


def model_at(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_the_next_command_works_as_it_is_printed(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model and a cluster whose names a shell would take apart: the directory is in it, and all is quoted."""
    monkeypatch.chdir(tmp_path)
    model = model_at(tmp_path / "my models" / "a; b")
    (tmp_path / "two gpus.toml").write_text('device = "H100"\ndevices_per_node = 2\n')
    asked = (str(model), "--on", "two gpus.toml", "--seq", "64", "--batch", "4", "--tokens", "1M")
    code, out, _ = plan(capsys, *asked)
    (next_line,) = [line for line in out.splitlines() if line.startswith("next: ")]
    found = document(capsys, *asked)
    assert code == 0 and next_line.removeprefix("next: ") in [one["command"] for one in found["plans"]]
    first, train = next_line.removeprefix("next: ").split(" && ")
    assert train == "shoal train plan.toml"
    done = subprocess.run(
        [*shlex.split(f"{sys.executable} -m"), *shlex.split(first)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    saved = load(tmp_path / "plan.toml").config
    assert saved.recipe.tokens == 10**6
    assert resolve(saved).model.hidden == 256


def test_an_export_is_started_where_it_was_written(capsys: Capture, tmp_path: Path) -> None:
    for stack in STACKS:
        to = tmp_path / f"to {stack}"
        if stack != "deepspeed":
            (to / stack).mkdir(parents=True)  # otherwise it is made
        # Torchtitan has few models by name.
        large = ("llama3-8b", "--on", "8xH100", *SMALL[3:5], "--batch", "8", "--layout", "fsdp=8")
        asked = large if stack == "torchtitan" else (*SMALL, "--layout", "fsdp=2")
        found = document(capsys, *asked, "--to", str(to), "--export", stack)
        assert set(found["written"]) & set(shlex.split(found["export"]["command"])), stack


def test_no_name_commands_the_terminal(capsys: Capture, tmp_path: Path) -> None:
    evil = model_at(tmp_path / "evil\x1b[2J\x1b]0;x\x07")
    for arguments in ((), ("--explain",), ("--layout", "dp=2"), ("--layout", "dp=3\x1b[2J")):
        _, out, err = plan(capsys, str(evil), *SMALL[1:], *arguments)
        assert "evil" in out + err or arguments[-1:] != ("dp=2",)
        assert "\x1b" not in out + err and "\x07" not in out + err
    _, out, err = plan(capsys, str(evil / "nowhere\x1b[2J"), *SMALL[1:])
    assert r"\x1b[2J" in err and "\x1b" not in err


@pytest.mark.long
def test_the_page_is_one_file_that_fetches_nothing(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    found = document(capsys, *SMALL, "--curve", "--tokens", "1B", "--html", str(path))
    page = PageReader(path.read_text())
    assert page.fetched == [] and page.handlers == []
    shown = json.dumps(page.data)
    assert all(one["layout"] in shown for one in found["plans"])
    assert [point["devices"] for point in found["curve"]["devices"]] == [1, 2, 4]


def test_no_torch_and_no_numpy(tmp_path: Path) -> None:
    page, config = str(tmp_path / "plan.html"), str(tmp_path / "run.toml")
    words = ["plan", *SMALL, "--json", "--html", page, "--save", config, "--explain", "--layout", "dp=2"]
    program = f"""
import sys
from shoal.cli.main import main
try:
    main({words!r})
finally:
    heavy = {{"torch", "numpy", "transformers"}} & sys.modules.keys()
    assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["plans"]


def test_the_library_has_the_same_face() -> None:
    program = """
import sys
import shoal
assert not {"torch", "pydantic", "shoal.facts"} & sys.modules.keys()
found = shoal.plan("llama3.2-1b", "2xH100", seq=1024, batch=4, top=2)
assert found.best.fits and found.as_json()["plans"][0]["layout"] == str(found.best.layout)
one = shoal.predict("llama3.2-1b", "2xH100", found.best.layout, seq=1024, batch=4)
assert one.step.seconds == found.best.step.seconds and one.memory == found.best.memory
assert shoal.Layout.parse("dp=2").world == 2 and shoal.Model and shoal.Cluster
import shoal.plan.search
assert callable(shoal.plan) and callable(shoal.predict)
assert "torch" not in sys.modules
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_help_has_an_example(capsys: Capture) -> None:
    code, out, _ = plan(capsys, "--help")
    assert code == 0 and "Example: shoal plan llama3-8b --on 64xH100" in " ".join(out.split())


def test_a_saved_config_finds_a_model_and_a_cluster_of_the_working_directory(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    example = Path(__file__).parents[2] / "examples" / "small.json"
    (tmp_path / "model.json").write_bytes(example.read_bytes())
    (tmp_path / "cluster.toml").write_text('device = "H100"\nhost_memory = 1_000_000_000_000\n')
    given = ["model.json", "--on", "cluster.toml", "--seq", "32", "--batch", "8", "--layout", "dp=8"]
    code, _, err = plan(capsys, *given, "--save", "configs/run.toml")
    assert code == 0, err
    job = resolve(load(Path("configs/run.toml")).config)
    assert job.model.layers and job.cluster.device.name == "H100"
