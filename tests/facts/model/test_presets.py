"""Presets: the sizes that were published, and how a model is found by what the user wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.facts.model.huggingface import write_config
from shoal.facts.model.parameters import active_parameter_count, parameter_count
from shoal.facts.model.presets import PRESETS, find
from shoal.facts.problem import BadInput

# The totals that the hub shows for the authors' own checkpoints.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]


def test_active_parameters_are_near_the_names_of_the_models() -> None:
    billions = {name: active_parameter_count(model) / 1e9 for name, model in PRESETS.items()}
    assert billions["qwen3-30b-a3b"] == pytest.approx(3.3, abs=0.1)
    assert billions["qwen3-235b-a22b"] == pytest.approx(22, abs=0.3)
    assert billions["mixtral-8x7b"] == pytest.approx(12.9, abs=0.1)
    assert billions["deepseek-v3"] == pytest.approx(37.5, abs=0.1)
    assert active_parameter_count(PRESETS["llama3-8b"]) == parameter_count(PRESETS["llama3-8b"])


def test_the_embedded_default_has_the_promised_shape() -> None:
    tiny = find("tiny")
    assert (tiny.layers, tiny.heads, tiny.kv_heads, tiny.head_dim) == (8, 8, 4, 8)
    assert (tiny.hidden, tiny.ffn, tiny.vocab, tiny.max_positions) == (64, 192, 264, 1024)
    assert tiny.tied and tiny.family == "llama" and tiny.vocab % 8 == 0


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_presets_are_consistent_in_themselves(model) -> None:
    assert model.heads % model.kv_heads == 0
    if model.family not in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "deepseek_v3"):
        assert model.heads * model.head_dim == model.hidden


def test_find_takes_a_preset_whatever_its_case() -> None:
    assert find("Llama3-8B") is PRESETS["llama3-8b"]


def test_find_takes_a_directory_and_the_path_of_a_config(tmp_path: Path) -> None:
    directory = tmp_path / "my-qwen"
    directory.mkdir()
    written = write_config(PRESETS["qwen3-8b"])
    (directory / "config.json").write_text(json.dumps(written))
    (tmp_path / "shape.json").write_text(json.dumps(written))
    expected = PRESETS["qwen3-8b"].model_copy(update={"name": "my-qwen"})
    assert find(str(directory)) == expected
    assert find(str(directory / "config.json")) == expected
    assert find(str(tmp_path / "shape.json")).name == "shape"


def test_a_preset_wins_over_a_directory_of_its_name(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find("tiny") is PRESETS["tiny"]
    with pytest.raises(BadInput, match="cannot read"):
        find("./tiny")


@pytest.mark.parametrize(
    "text", ["", "llama3-8", "meta-llama/Llama-3-8B", "x" * 5000, "~nobody-here/m", "a\0b"]
)
def test_what_is_not_found_is_told_with_the_presets(text: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(write_config(PRESETS["tiny"])))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        find(text)
    assert all(name in str(caught.value) for name in PRESETS)
    assert ("did you mean 'llama3-8b'?" in str(caught.value)) == ("lama" in text)


def test_finding_a_model_never_loads_torch() -> None:
    code = "import sys; from shoal.facts.model.presets import find; find('tiny'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
