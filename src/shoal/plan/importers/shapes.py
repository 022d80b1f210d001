"""The model that an imported file describes: a preset of this shape if there is one, otherwise a custom shape."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from shoal.facts.input.untrusted_files import first_fault
from shoal.facts.model import Family, Model
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput
from shoal.plan.importers.reading import Reading


def placed(said: dict[str, Any], reading: Reading, seq: int) -> tuple[dict[str, Any], Model | None]:
    """The ``[model]`` table for the file's network fields, and a shape that no preset has.

    If there is neither, a note says why, and the config keeps its default.
    """
    for name, preset in PRESETS.items():
        if all(_same(key, value, preset, seq) for key, value in said.items()):
            if "vocab" not in said:
                reading.note(
                    f"the file does not hold the vocabulary: that of {name}, {preset.vocab}, is taken"
                )
            return {"preset": name}, None
    size = f"{said.get('layers')} layers, {said.get('hidden')} wide"
    if "vocab" not in said:
        reading.note(f"the model ({size}): the file does not hold its vocabulary; name it with --model")
        return {}, None
    try:
        fields = {"max_positions": seq or None, **said}
        shape = Model.model_validate({"name": "imported", "family": _family(said), **fields})
        write_config(shape)
    except ValidationError as error:
        raise BadInput(
            f"{reading.source}: as a model, {first_fault(error)}", "correct the sizes there"
        ) from None
    except BadInput as error:
        what = error.problems[0].what.partition(": ")[2]
        reading.note(f"the model ({size}): {what}, so no model here has its shape; name one with --model")
        return {}, None
    return {}, shape


def _same(key: str, value: Any, preset: Model, seq: int) -> bool:
    theirs = getattr(preset, key)
    if key == "max_positions":
        return bool(value == max(theirs, seq))
    if isinstance(value, dict):
        return theirs is not None and all(
            _near(inner, getattr(theirs, name)) for name, inner in value.items()
        )
    return _near(value, theirs)


def _near(one: Any, other: Any) -> bool:
    """Equal to six digits, as precise as a command line."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return bool(one == other)


def _family(said: dict[str, Any]) -> Family:
    """The block's family, which decides what a Hugging Face config can express."""
    if said.get("latent"):
        return "deepseek_v3"
    if said.get("experts"):
        return "qwen3_moe" if said.get("qk_norm") else "mixtral"
    if said.get("positions") == "learned":
        return "gpt2"
    if said.get("norm") == "layer":
        return "gpt_neox"
    if said.get("qk_norm"):
        return "qwen3"
    if said.get("qkv_bias") and not said.get("out_bias"):
        return "qwen2"
    return "mistral" if said.get("window") else "llama"
