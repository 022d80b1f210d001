"""Well-known models by name, with the shapes of their published ``config.json``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.model import Experts, Family, Latent, Model, RopeScaling, hub
from shoal.facts.model.by_size import of_size
from shoal.facts.model.huggingface import read_config
from shoal.facts.problem import BadInput, did_you_mean

CONFIG, MANIFEST, ADAPTER = "config.json", "manifest.json", "adapter_config.json"
LARGEST_MANIFEST = 1 << 30  # of a checkpoint, which lists every piece

_LLAMA3: dict[str, Any] = {"rope_theta": 5e5}
_LLAMA31: dict[str, Any] = {
    **_LLAMA3,
    "rope_scaling": RopeScaling(kind="llama3", factor=8, original_positions=8192),
}
_LLAMA32: dict[str, Any] = {
    **_LLAMA3,
    "rope_scaling": RopeScaling(kind="llama3", factor=32, original_positions=8192),
    "tied": True,
}
_QWEN2: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1e6, "qkv_bias": True}
_QWEN25: dict[str, Any] = {**_QWEN2, "norm_eps": 1e-5}
_QWEN3: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1e6, "qk_norm": True}
_GEMMA: dict[str, Any] = {
    "norm_eps": 1e-6,
    "norm_offset": True,
    "output_norms": True,
    "scaled_embedding": True,
    "activation": "gelu_tanh",
    "tied": True,
}
_GEMMA2: dict[str, Any] = {**_GEMMA, "window": 4096, "attention_cap": 50.0, "logit_cap": 30.0}
_GEMMA3: dict[str, Any] = {**_GEMMA, "window": 512, "rope_theta": 1e6, "window_theta": 1e4, "qk_norm": True}
_GEMMA3_LONG: dict[str, Any] = {
    **_GEMMA3,
    "window": 1024,
    "rope_scaling": RopeScaling(kind="linear", factor=8, original_positions=131072),
}


def _turns(layers: int, turn: int) -> dict[str, Any]:
    """All layers have a window except every ``turn``-th."""
    return {"window_layers": tuple(layer for layer in range(layers) if (layer + 1) % turn)}


_GEMMA2_2B = _GEMMA2 | _turns(26, 2)
_GEMMA2_9B = _GEMMA2 | _turns(42, 2)
_GEMMA2_27B = _GEMMA2 | _turns(46, 2) | {"query_width": 144}
_GEMMA3_270M = _GEMMA3 | _turns(18, 6)
_GEMMA3_1B = _GEMMA3 | _turns(26, 6)
_GEMMA3_4B = _GEMMA3_LONG | _turns(34, 6)
_GEMMA3_12B = _GEMMA3_LONG | _turns(48, 6)
_GEMMA3_27B = _GEMMA3_LONG | _turns(62, 6) | {"query_width": 168}
_GPT: dict[str, Any] = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
_GPT2: dict[str, Any] = {**_GPT, "activation": "gelu_tanh", "positions": "learned", "tied": True}
_PYTHIA: dict[str, Any] = {**_GPT, "activation": "gelu", "parallel_residual": True, "rope_fraction": 0.25}
_NEOX: dict[str, Any] = {**_PYTHIA, "activation": "gelu_tanh"}
_MIXTRAL: dict[str, Any] = {"rope_theta": 1e6, "experts": Experts(count=8, active=2, ffn=14336)}
_MIXTRAL_22B: dict[str, Any] = {"rope_theta": 1e6, "experts": Experts(count=8, active=2, ffn=16384)}
_QWEN3_30B: dict[str, Any] = {**_QWEN3, "experts": Experts(count=128, active=8, ffn=768)}
_QWEN3_235B: dict[str, Any] = {**_QWEN3, "experts": Experts(count=128, active=8, ffn=1536)}
_TINY_MOE: dict[str, Any] = {
    **_QWEN3,
    "tied": True,
    "init_std": 0.08,
    "experts": Experts(count=8, active=2, ffn=64),
}
_DEEPSEEK: dict[str, Any] = {
    "norm_eps": 1e-6,
    "rope_scaling": RopeScaling(
        kind="yarn", factor=40, original_positions=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    "experts": Experts(
        count=256,
        active=8,
        ffn=2048,
        shared=1,
        shared_ffn=2048,
        dense_layers=(0, 1, 2),
        router_bias=True,
        groups=8,
        active_groups=4,
        score="sigmoid",
        scale=2.5,
    ),
    "latent": Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
}


def _preset(
    name: str,
    family: Family,
    layers: int,
    hidden: int,
    heads: tuple[int, int],  # query heads, key/value heads
    head_dim: int,
    ffn: int,
    vocab: int,
    max_positions: int,
    **others: Any,
) -> Model:
    return Model(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_positions=max_positions,
        **others,
    )


_ALL = (
    # The embedded default: bytes 0 to 255 and a few specials, padded to a multiple of eight. So narrow a network
    # learns much faster from larger initial weights: 0.08 instead of 0.02.
    _preset("tiny", "llama", 8, 64, (8, 4), 8, 192, 264, 1024, tied=True, init_std=0.08),
    # The same with eight experts, two per token.
    _preset("tiny-moe", "qwen3_moe", 8, 64, (8, 4), 8, 192, 264, 1024, **_TINY_MOE),
    _preset("llama2-7b", "llama", 32, 4096, (32, 32), 128, 11008, 32000, 4096),
    _preset("llama2-13b", "llama", 40, 5120, (40, 40), 128, 13824, 32000, 4096),
    _preset("llama2-70b", "llama", 80, 8192, (64, 8), 128, 28672, 32000, 4096),
    _preset("llama3-8b", "llama", 32, 4096, (32, 8), 128, 14336, 128256, 8192, **_LLAMA3),
    _preset("llama3-70b", "llama", 80, 8192, (64, 8), 128, 28672, 128256, 8192, **_LLAMA3),
    _preset("llama3.1-8b", "llama", 32, 4096, (32, 8), 128, 14336, 128256, 131072, **_LLAMA31),
    _preset("llama3.1-70b", "llama", 80, 8192, (64, 8), 128, 28672, 128256, 131072, **_LLAMA31),
    _preset("llama3-405b", "llama", 126, 16384, (128, 8), 128, 53248, 128256, 131072, **_LLAMA31),
    _preset("llama3.2-1b", "llama", 16, 2048, (32, 8), 64, 8192, 128256, 131072, **_LLAMA32),
    _preset("mistral-7b", "mistral", 32, 4096, (32, 8), 128, 14336, 32000, 32768, window=4096),
    _preset("qwen2-7b", "qwen2", 28, 3584, (28, 4), 128, 18944, 152064, 131072, **_QWEN2),
    _preset("qwen2.5-14b", "qwen2", 48, 5120, (40, 8), 128, 13824, 152064, 131072, **_QWEN25),
    _preset("qwen3-8b", "qwen3", 36, 4096, (32, 8), 128, 12288, 151936, 40960, **_QWEN3),
    _preset("qwen3-32b", "qwen3", 64, 5120, (64, 8), 128, 25600, 151936, 40960, **_QWEN3),
    _preset("gemma2-2b", "gemma2", 26, 2304, (8, 4), 256, 9216, 256000, 8192, **_GEMMA2_2B),
    _preset("gemma2-9b", "gemma2", 42, 3584, (16, 8), 256, 14336, 256000, 8192, **_GEMMA2_9B),
    _preset("gemma2-27b", "gemma2", 46, 4608, (32, 16), 128, 36864, 256000, 8192, **_GEMMA2_27B),
    _preset("gemma3-270m", "gemma3_text", 18, 640, (4, 1), 256, 2048, 262144, 32768, **_GEMMA3_270M),
    _preset("gemma3-1b", "gemma3_text", 26, 1152, (4, 1), 256, 6912, 262144, 32768, **_GEMMA3_1B),
    # The text part only; published together with a vision part.
    _preset("gemma3-4b", "gemma3_text", 34, 2560, (8, 4), 256, 10240, 262208, 131072, **_GEMMA3_4B),
    _preset("gemma3-12b", "gemma3_text", 48, 3840, (16, 8), 256, 15360, 262208, 131072, **_GEMMA3_12B),
    _preset("gemma3-27b", "gemma3_text", 62, 5376, (32, 16), 128, 21504, 262208, 131072, **_GEMMA3_27B),
    _preset("gpt2", "gpt2", 12, 768, (12, 12), 64, 3072, 50257, 1024, **_GPT2),
    _preset("gpt2-xl", "gpt2", 48, 1600, (25, 25), 64, 6400, 50257, 1024, **_GPT2),
    # Never published as a config: the sizes in its paper, with GPT-2's shape and vocabulary.
    _preset("gpt3-175b", "gpt2", 96, 12288, (96, 96), 128, 49152, 50257, 2048, **_GPT2),
    _preset("pythia-6.9b", "gpt_neox", 32, 4096, (32, 32), 128, 16384, 50432, 2048, **_PYTHIA),
    _preset("gpt-neox-20b", "gpt_neox", 44, 6144, (64, 64), 96, 24576, 50432, 2048, **_NEOX),
    _preset("mixtral-8x7b", "mixtral", 32, 4096, (32, 8), 128, 14336, 32000, 32768, **_MIXTRAL),
    _preset("mixtral-8x22b", "mixtral", 56, 6144, (48, 8), 128, 16384, 32000, 65536, **_MIXTRAL_22B),
    _preset("qwen3-30b-a3b", "qwen3_moe", 48, 2048, (32, 4), 128, 6144, 151936, 40960, **_QWEN3_30B),
    _preset("qwen3-235b-a22b", "qwen3_moe", 94, 4096, (64, 4), 128, 12288, 151936, 40960, **_QWEN3_235B),
    _preset("deepseek-v3", "deepseek_v3", 61, 7168, (128, 128), 192, 18432, 129280, 163840, **_DEEPSEEK),
)

PRESETS: dict[str, Model] = {model.name: model for model in _ALL}


def find(text: str) -> Model:
    """A preset by name, else a directory with a ``config.json``, the path of one, or a size such as 10B.

    A directory with a preset's name needs a slash: ``./tiny``.
    """
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = _config_path(text)
    if path is not None and path.suffix.lower() == ".toml":
        raise BadInput(
            f"{text!r} is a TOML file, not a model",
            "a preset, a model's directory or its config.json; shoal dryrun and shoal train take a config",
        )
    if path is not None:
        return _read(path)
    if (sized := of_size(text)) is not None:
        return sized
    # Only the last part of a Hub id can be a preset.
    guess = did_you_mean(text.lower().rpartition("/")[2], PRESETS)
    if hub.is_hub_name(text):
        near = f"{guess} " if guess.startswith("did you mean") else ""  # else the list, which follows
        return _of_hub(text, f"{near}presets: {', '.join(PRESETS)}; or ")
    advice = (
        f"presets: {', '.join(PRESETS)}; or the path of a config.json, a Hub name (org/name), or a size: 10B"
    )
    raise BadInput(
        f"{text!r} is neither a preset nor a model on this machine",
        f"{guess} {advice}" if guess.startswith("did you mean") else advice,
    )


def at(text: str) -> Model:
    """The model in a directory with a ``config.json`` or at the path of one; also in a run or a checkpoint."""
    path = _config_path(text)
    if path is None and hub.is_hub_name(text):
        return _of_hub(text)
    if path is None:
        raise BadInput(
            f"there is no model at {text!r}",
            "a directory that holds config.json, the path of one, a run, a checkpoint, or a Hub name (org/name)",
        )
    return _read(path)


def _of_hub(name: str, guess: str = "") -> Model:
    """``guess``: what the user may have meant instead."""
    try:
        found = read_config(hub.fetch(name, hub.CONFIG, newest=False) / CONFIG)
    except BadInput as error:
        raise BadInput([replace(one, fix=guess + one.fix) for one in error.problems]) from None
    return found.model_copy(update={"name": name.partition("@")[0].partition("/")[2]})


def _read(path: Path) -> Model:
    """From a ``config.json``, or from the ``manifest.json`` of a run or a checkpoint, which hold the shape."""
    if path.name == CONFIG and not path.exists() and (path.parent / ADAPTER).is_file():
        raise BadInput(
            f"{str(path.parent)!r} holds an adapter that PEFT saved, and no model",
            f'model.lora = {{init_from = "{path.parent}", …}}, and model.init_from = the model that it is for',
        )
    if path.name != MANIFEST:
        return read_config(path)
    try:
        return Model.model_validate(read_json(path, LARGEST_MANIFEST)["model"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(
            f"{path} does not say which model this is", "a run, a checkpoint or a config.json"
        ) from None


def _config_path(text: str) -> Path | None:
    if not text:
        return None  # otherwise it would mean the current directory
    try:
        path = Path(text).expanduser()
        if path.is_dir() and not (path / CONFIG).exists():
            # A run, its checkpoints directory, or a checkpoint.
            for folder in (path.parent, path) if path.name == "checkpoints" else (path,):
                if (folder / MANIFEST).is_file():
                    return folder / MANIFEST
            # Checkpoints without a run: imported or copied.
            inside = path if path.name == "checkpoints" else path / "checkpoints"
            if found := [one for one in inside.glob("step-*") if (one / MANIFEST).is_file()]:
                return max(found, key=lambda one: (len(one.name), one.name)) / MANIFEST
        if path.is_dir():
            return path / CONFIG
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name too long for a file, an unknown user's home, a NUL
        return None
