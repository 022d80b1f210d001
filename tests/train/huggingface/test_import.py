"""``model.init_from``: model directories, runs, checkpoints and names of the Hub; what is not whole is refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import Train
from tests.ranks import run_ranks
from tests.train.huggingface.hub_server import hub_of
from tests.train.huggingface.models import save_random
from torch import Tensor

from shoal.cli.main import main
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import canonical_parameters
from shoal.facts.model.presets import PRESETS, at
from shoal.facts.problem import BadInput
from shoal.facts.recipe import Recipe
from shoal.models.huggingface import WeightFiles
from shoal.models.initial import Slice
from shoal.parallel.mesh import Mesh
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.first_weights import weights_of
from shoal.train.program import assemble, blueprint

Settings = Callable[..., list[str]]


@pytest.mark.parametrize("layout", ["dp=1", "fsdp=2", "tp=2"])
def test_a_new_run_begins_with_anothers_weights(train: Train, layout: str) -> None:
    """From a run and from one of its checkpoints: the first loss is the one that the other would have had next."""
    first = train(
        "first", recipe__steps=6, recipe__schedule="constant", checkpoint__every=3, checkpoint__keep=9
    )
    for origin, step in ((first.directory.path, 6), (first.directory.checkpoints / "step-00000003", 3)):
        name = f"second-{step}-{layout}"
        # Rates of zero but for rounding: what is written is what was read.
        options = {"recipe__lr": 1e-30, "recipe__steps": 1, "model__path": "", "checkpoint__every": 1}
        second = train(name, layout, model__init_from=origin, **options)
        assert second.report.code == 0, second.report.message
        theirs = Checkpoint(first.directory.disk, step)
        ours = second.checkpoint()
        assert ours.manifest.model == theirs.manifest.model | {"name": ours.manifest.model["name"]}
        for tensor in ours.manifest.shapes:
            assert torch.equal(ours.tensor("weight", tensor), theirs.tensor("weight", tensor)), tensor


def test_the_shape_of_a_run_is_known_by_its_directory(train: Train, tmp_path: Path) -> None:
    run = train(recipe__steps=2)
    shape = at(str(run.directory.path))
    assert shape == at(str(run.directory.checkpoints)) == at(str(run.directory.checkpoints / "step-00000002"))
    assert shape.hidden == 32
    with pytest.raises(BadInput, match=r"init_from: .* is .* in .*step-00000002, wide has"):
        weights_of(str(run.directory.path), shape.model_copy(update={"hidden": 64, "name": "wide"}))


def _cut(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def _flip_header(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[9] ^= 0xFF
    file.write_bytes(content)


def _lose(path: Path) -> None:
    sorted(path.glob("*.safetensors"))[1].unlink()


def _lose_with_index(path: Path) -> None:
    _lose(path)
    (path / "model.safetensors.index.json").unlink()


def _widen(path: Path) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 56}))


def _quantize(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    tensors: dict[str, Tensor] = load_file(file)
    save_file({name: one.to(torch.int8) for name, one in tensors.items()}, file)


def _rename(path: Path, ending: str) -> None:
    for file in path.glob("*.safetensors"):
        file.rename(file.with_suffix(ending))
    (path / "model.safetensors.index.json").unlink()


def _point(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n")


def _add(path: Path, name: str) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    save_file({**load_file(file), name: torch.zeros(32)}, file)


DAMAGES = {
    "holds 1 tensors that .* no place for: model.layers.1.self_attn.q_proj.bias": partial(
        _add, name="model.layers.1.self_attn.q_proj.bias"
    ),
    "no place for: model.layers.0.self_attn.q_norm.weight": partial(
        _add, name="model.layers.0.self_attn.q_norm.weight"
    ),
    "pointer of Git LFS.*git lfs pull": _point,
    r"no \*.safetensors files.*download the rest": partial(_rename, ending=".safetensors.incomplete"),
    r"no \*.safetensors files.*save_pretrained": partial(_rename, ending=".bin"),
    "not downloaded whole": _cut,
    "it is damaged": _flip_header,
    "lacks 1 of the": _lose,
    r"lacks \d+ of the 21 tensors": _lose_with_index,
    r"mlp.gate_proj.weight is \(48, 32\), .* has \(56, 32\), and 5 more differ": _widen,
    "is stored as I8": _quantize,
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_what_is_not_whole_is_refused_before_anything_is_spawned(
    train: Train, tmp_path: Path, reason: str
) -> None:
    save_random("llama", tmp_path / "model").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    DAMAGES[reason](tmp_path / "model")
    with pytest.raises(BadInput, match=f"(?s){reason}") as refused:
        train("run", model__path="", model__init_from=tmp_path / "model")
    assert len(refused.value.problems) == 1
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_embedding(train: Train, tmp_path: Path) -> None:
    from shoal.train.huggingface.byte_tokenizer import tokenizer_json

    save_random("llama", tmp_path / "model")
    content = json.loads(tokenizer_json())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 264, "content": "<|more|>"})
    for id in range(257, 264):
        content["model"]["vocab"][f"filler-{id}"] = id
    content["model"]["vocab"]["<|more|>"] = 264
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"has 265 tokens .* a vocabulary of 264") as refused:
        train(
            "run",
            model__path="",
            model__init_from=tmp_path / "model",
            data__tokenizer=tmp_path / "tokenizer.json",
        )
    assert len(refused.value.problems) == 1 and not (tmp_path / "run").exists()


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    """Of a whole tensor too: no copy of it is made on the way. A quarter of the rows costs about a quarter."""
    model = PRESETS["tiny"].model_copy(update={"layers": 2, "hidden": 2048, "heads": 16, "kv_heads": 16})
    model = model.model_copy(update={"head_dim": 128, "ffn": 8192, "vocab": 20_000, "tied": False})
    run_ranks(1, _write_wide, model, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 800e6
    for parts in (1, 4):
        ((grown, held),) = run_ranks(1, _read_part, model, tmp_path, parts)
        assert held < 1.05 * size / parts
        assert grown < held + 200e6, (parts, grown, held)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "pp=2"])
def test_no_rank_holds_more_than_its_layout_says(layout: str, tmp_path: Path) -> None:
    """Each of two ranks, from before the network is there until its weights are."""
    model = PRESETS["tiny"].model_copy(update={"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8})
    model = model.model_copy(update={"head_dim": 128, "ffn": 8192, "vocab": 20_000, "tied": False})
    run_ranks(1, _write_wide, model, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    for grown, held in run_ranks(2, _build, model, tmp_path, layout):
        assert 0.4 * size < held < 0.6 * size
        assert grown < held + 300e6, (layout, grown, held)


def _build(rank: int, world: int, model: Model, path: Path, layout: str) -> tuple[int, int]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe = Recipe(seq=8, batch=2, precision="fp32")
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    step = assemble(blueprint(model, recipe), recipe, TuneSection(), mesh, weights_of(str(path), model))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert all(bool((piece.tensor == 0.5).all()) for piece in step.pieces)
    return grown, sum(piece.tensor.nbytes for piece in step.pieces)


def _write_wide(rank: int, world: int, model: Model, path: Path) -> None:
    tensors = {}
    for name, shape, _ in canonical_parameters(model):
        tensors[name] = torch.full(shape, 0.5)
    save_file(tensors, path / "model.safetensors")


def _read_part(rank: int, world: int, model: Model, path: Path, parts: int) -> tuple[int, int]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slices = []
    for name, shape, _ in canonical_parameters(model):
        rows = shape[0] // parts
        local = torch.zeros((rows, *shape[1:]))
        slices.append((name, Slice(local, shape, (rows * (parts - 1), *(0 for _ in shape[1:])))))
    weights_of(str(path), model)(slices)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert all(bool((part.local == 0.5).all()) for _, part in slices)
    return grown, sum(part.local.nbytes for _, part in slices)


def test_a_box_of_a_file_is_the_box_of_the_tensor(tmp_path: Path) -> None:
    save_random("gpt2", tmp_path)
    model = at(str(tmp_path))
    files = WeightFiles(tmp_path, model)
    whole = load_file(tmp_path / "model.safetensors")["transformer.h.1.attn.c_attn.weight"]
    assert torch.equal(files.read("transformer.h.1.attn.c_attn.weight", (3, 40), (5, 20)), whole[3:8, 40:60])


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral"])
def test_a_model_directory_as_a_checkpoint_and_back(
    train: Train, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def shoal(*words: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *map(str, words)])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    model: Any = save_random(family, tmp_path / "model").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    assert shoal("import", tmp_path / "model", tmp_path / "base") == 0
    assert shoal("verify", tmp_path / "base") == 0
    assert shoal("export", tmp_path / "base", tmp_path / "back") == 0
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "back"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert at(str(tmp_path / "base")).hidden == at(str(tmp_path / "model")).hidden == 32
    assert shoal("import", tmp_path / "model", tmp_path / "base") == 2
    with pytest.raises(BadInput, match="and no run"):
        train("base")
    (tmp_path / "model" / "model.safetensors").unlink()
    capsys.readouterr()
    assert shoal("import", tmp_path / "model", tmp_path / "none") == 2 and not (tmp_path / "none").exists()
    assert "no *.safetensors files" in capsys.readouterr().err


def test_rows_beyond_the_positions_of_the_weights(train: Train, tmp_path: Path) -> None:
    save_random("llama", tmp_path / "model")
    with pytest.raises(BadInput, match="longer than the 64 positions") as refused:
        train("run", model__path="", model__init_from=tmp_path / "model", recipe__seq=65)
    assert len(refused.value.problems) == 1 and not (tmp_path / "run").exists()


@pytest.mark.long
def test_names_of_the_hub(settings: Settings, tmp_path: Path) -> None:
    """Fetched from a server, found in the cache without one; a name that is not there is one line."""
    save_random("llama", tmp_path / "published")
    (tmp_path / "published" / "modeling_evil.py").write_text("raise SystemExit")
    options = ["recipe.steps=1", "model.init_from=reef/small-llama", "model.path=", "checkpoint.every=0"]

    def train(endpoint: str, *more: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        words = [word for one in (*settings(), *options, *more) for word in ("--set", one)]
        command = [sys.executable, "-m", "shoal", "train", *words, "--layout", "dp=1", "--run"]
        return subprocess.run(
            [*command, str(tmp_path / f"run{len(more)}")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    with hub_of("reef/small-llama", tmp_path / "published") as (endpoint, asked):
        done = train(endpoint)
        assert done.returncode == 0, done.stderr
        assert any(one.endswith("/model.safetensors") for one in asked)
        assert not any("modeling_evil" in one for one in asked)
        refused = train(endpoint, "model.init_from=reef/missing")
        assert refused.returncode == 2 and "'reef/missing' is no directory here" in refused.stderr
    unreachable = train("http://127.0.0.1:9", "model.init_from=reef/other")
    assert unreachable.returncode == 2, unreachable.stderr
    lines = [line for line in unreachable.stderr.splitlines() if line.startswith("error")]
    assert (
        len(lines) == 1
        and "fetching it from the Hub failed" in lines[0]
        and "Traceback" not in unreachable.stderr
    )
    assert not (tmp_path / "run1").exists()
