"""``shoal checkpoint export``: a whole model directory or none, which ``transformers`` and Shoal itself read."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.conftest import Train
from tests.ranks import run_ranks
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import commit, make_state
from tests.train.huggingface.models import load

from shoal.cli.main import main
from shoal.facts.model.presets import PRESETS
from shoal.launch.generate import ends_of, find_source
from shoal.train.checkpoint.listing import newest_sound
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.huggingface.export import export
from shoal.train.huggingface.side_files import Origin
from shoal.train.run_directory import RunDirectory

Output = pytest.CaptureFixture[str]
PLAIN = Origin("bytes", None, None, ())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Two checkpoints of a small model with a byte tokenizer."""
    run = RunDirectory(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.config.write_text('[data]\ntokenizer = "bytes"\n')
    shape = small("tiny").model_copy(update={"vocab": 264})
    for step in (2, 4):
        commit(make_state(shape, steps=step), run.checkpoints, step, step * 8, {})
    yield run


def shoal(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_newest_checkpoint_or_the_one_named(run: RunDirectory, tmp_path: Path, capsys: Output) -> None:
    assert shoal(run.path, "--to", "hf", tmp_path / "newest", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["step"], done["dtype"], done["files"]) == (4, "float32", 1)
    assert shoal(run.checkpoints / "step-00000002", "--to", "hf", tmp_path / "named") == 0
    assert "step 2" in capsys.readouterr().out
    for name, step in (("newest", 4), ("named", 2)):
        written = load_file(tmp_path / name / "model.safetensors")
        checkpoint = Checkpoint(run.disk, step)
        assert written.keys() == checkpoint.manifest.shapes.keys()
        for tensor, content in written.items():
            assert torch.equal(content, checkpoint.tensor("weight", tensor)), tensor
    assert not list(tmp_path.glob(".*"))


def test_shards_and_their_index(run: RunDirectory, tmp_path: Path) -> None:
    assert shoal(run.path, "--to", "hf", tmp_path / "cut", "--shard-gb", "0.00002", "--dtype", "bf16") == 0
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 2 and {path.name for path in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for path in files for tensor in load_file(path).values()
    )
    whole = load(tmp_path / "cut")
    assert whole.dtype == torch.bfloat16
    checkpoint = Checkpoint(run.disk, 4)
    for name, tensor in whole.state_dict().items():
        if name in checkpoint.manifest.shapes:
            assert torch.equal(tensor, checkpoint.tensor("weight", name).bfloat16()), name


@pytest.mark.parametrize("text", ["plain", "ünï – 漢字 🐟", "a  b\n\tc ", "<|endof", "\x00\x7f"])
def test_the_byte_tokenizer_is_the_same_in_transformers(run: RunDirectory, tmp_path: Path, text: str) -> None:
    assert shoal(run.path, "--to", "hf", tmp_path / "out") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    (ids,) = open_tokenizer("bytes").encode_batch([text])
    assert theirs(text)["input_ids"] == ids.tolist() and theirs.decode(ids.tolist()) == text
    assert theirs.eos_token_id == 256
    ours = open_tokenizer(str(tmp_path / "out"))
    assert (ours.end, ours.vocab) == (256, 257)
    assert ours.encode_batch([text])[0].tolist() == ids.tolist()
    made = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert made.eos_token_id == 256


def test_a_runs_own_tokenizer_template_and_sampling_go_along(
    train: Train, small_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert shoal_tokenizer(model)
    (model / "config.json").write_text(
        json.dumps(json.loads(small_model.read_text()) | {"bos_token_id": 7, "pad_token_id": 9})
    )
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "do_sample": true}')
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ran = train("run", model__path=model, data__tokenizer=model / "tokenizer.json", recipe__steps=2)
    assert shoal(ran.directory.path, "--to", "hf", tmp_path / "out") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["pad_token_id"], config["eos_token_id"]) == (7, 9, 256)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        ('format = "chat"\ntemplate = "{folder}/chat.jinja"', [256, 258]),
        ('format = "text"', 256),
        ('format = "text"\nend_token = "<|im_end|>"', [256, 258]),
        ('format = "prompt"\ntemplate = "none"', 256),
        ('mix = [{{source = "x", format = "chat"}}]\ntemplate = "{folder}/chat.jinja"', [256, 258]),
    ],
    ids=["a template of the run's own", "text", "another end", "no template", "a mix"],
)
def test_what_learned_another_end_stops_there(
    run: RunDirectory, tmp_path: Path, data: str, ends: object
) -> None:
    """A base model, whose texts end with one token, learned answers that end with another."""
    base = tmp_path / "base"
    base.mkdir()
    content = json.loads(shoal_tokenizer(base).read_text())
    for id, text in ((257, "<|im_start|>"), (258, "<|im_end|>")):
        content["added_tokens"].append(content["added_tokens"][0] | {"id": id, "content": text})
    (base / "tokenizer.json").write_text(json.dumps(content))
    (base / "generation_config.json").write_text(
        '{"eos_token_id": 256, "temperature": 0.6, "do_sample": true}'
    )
    (tmp_path / "chat.jinja").write_text(CHATML)
    settings = (
        f'[model]\ninit_from = "{base}"\n[data]\ntokenizer = "{base}"\n{data.format(folder=tmp_path)}\n'
    )
    run.config.write_text(settings)
    assert shoal(run.path, "--to", "hf", tmp_path / "out") == 0
    made = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert made.eos_token_id == ends and made.temperature == 0.6
    assert (tmp_path / "out" / "chat_template.jinja").is_file() == ("chat.jinja" in data)
    source = find_source(str(run.path))
    tokenizer = open_tokenizer(source.origin.tokenizer, source.origin.end_token)
    assert sorted(ends_of(source, tokenizer)) == (ends if isinstance(ends, list) else [ends])


def shoal_tokenizer(into: Path) -> Path:
    from shoal.train.huggingface.byte_tokenizer import tokenizer_config, tokenizer_json

    (into / "tokenizer_config.json").write_text(tokenizer_config(64))
    (into / "tokenizer.json").write_text(tokenizer_json())
    return into / "tokenizer.json"


def test_nothing_half_written(run: RunDirectory, tmp_path: Path, capsys: Output) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    assert shoal(run.path, "--to", "hf", full) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert shoal(tmp_path / "nothing", "--to", "hf", tmp_path / "out") == 2
    assert shoal(run.path, "--to", "hf", tmp_path / "out", "--tokenizer", tmp_path / "none.json") == 2
    assert "there is no tokenizer" in capsys.readouterr().err
    file = run.checkpoints / "step-00000004" / "rank-00000.bin"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    assert shoal(run.path, "--to", "hf", tmp_path / "out") == 1
    assert "BLAKE3 differs" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]


def test_values_beyond_fp16_are_refused(tmp_path: Path, capsys: Output) -> None:
    state = make_state(small("tiny").model_copy(update={"vocab": 264}))
    state.pieces[0].tensor.data.view(-1)[3] = 1e6
    commit(state, tmp_path / "checkpoints", 1, 8, {})
    assert shoal(tmp_path / "checkpoints", "--to", "hf", tmp_path / "out", "--dtype", "fp16") == 2
    assert "beyond the range of fp16" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert shoal(tmp_path / "checkpoints", "--to", "hf", tmp_path / "out", "--dtype", "bf16") == 0


WIDE = {"hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1024, "vocab": 264}


def test_no_process_holds_the_model(tmp_path: Path) -> None:
    """Twelve layers, 130 MB, take hardly more memory than one: what is read at a time, and its copy."""
    for folder, layers in (("small", 1), ("wide", 12)):
        (tmp_path / folder).mkdir()
        run_ranks(1, _commit, PRESETS["tiny"].model_copy(update=WIDE | {"layers": layers}), tmp_path / folder)
    ((grown, size),) = run_ranks(1, _export, tmp_path / "small", tmp_path / "wide")
    assert size > 100e6
    assert grown < size / 2, (grown, size)


def _commit(rank: int, world: int, model: object, path: Path) -> None:
    commit(make_state(model, steps=0), path / "checkpoints", 1, 8, {})  # type: ignore[arg-type]


def _export(rank: int, world: int, first: Path, path: Path) -> tuple[int, int]:
    # A forked process maps the libraries' code when it first runs: up to 50 MB that would count as the export's.
    export(newest_sound(first / "checkpoints"), first / "out", PLAIN)
    found = newest_sound(path / "checkpoints")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = export(found, path / "out", PLAIN).bytes
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, size
