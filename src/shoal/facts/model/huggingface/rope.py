"""Rotary settings of a ``config.json``: top-level keys in ``transformers`` 4, ``rope_parameters`` in 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.facts.model import MOST_POSITIONS, Model, RopeScaling
from shoal.facts.model.huggingface.fields import Fields
from shoal.facts.problem import did_you_mean

_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Gemma 3: the base in layers with a window; in transformers 5 each kind of layer has its own object.
LOCAL_THETA, _LOCAL, _GLOBAL = "rope_local_base_freq", "sliding_attention", "full_attention"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeKeys:
    """A family's spelling of the two top-level keys, and its defaults."""

    theta: tuple[str, ...] = ("rope_theta",)
    fraction: tuple[str, ...] = ("partial_rotary_factor",)
    default_theta: float = 10_000.0
    default_fraction: float = 1.0


def read_rope(fields: Fields, keys: RopeKeys, max_positions: int) -> tuple[float, float, RopeScaling | None]:
    """Theta, the rotated share of each head, and the scaling."""
    inner = Fields(_object(fields), f"{fields.where}: rope", fields.problems)
    theta = _number(fields, inner, "rope_theta", keys.theta, keys.default_theta)
    fraction = _number(fields, inner, "partial_rotary_factor", keys.fraction, keys.default_fraction)
    return theta, fraction, _read_scaling(fields, inner, max_positions)


def read_window_theta(fields: Fields) -> float:
    """The base in layers with a window, which have no scaling."""
    inner = Fields(_object(fields, _LOCAL), f"{fields.where}: rope of {_LOCAL}", fields.problems)
    kind = inner.look(("rope_type", "type"), "default")
    if kind != "default" or not set(inner.values) <= _COMMON_KEYS:
        inner.problem(f"type {kind!r} with {sorted(inner.values)}", "only a default type with rope_theta is")
    return _number(fields, inner, "rope_theta", (LOCAL_THETA,), 10_000.0)


def _object(fields: Fields, layers: str = _GLOBAL) -> dict[str, Any]:
    """``rope_scaling`` (4) or ``rope_parameters`` (5); for this kind of layers, if kinds have objects of their own."""
    written = [
        (key, fields.values[key]) for key in ("rope_scaling", "rope_parameters") if fields.values.get(key)
    ]
    for number, (key, value) in enumerate(written):
        if isinstance(value, dict) and fields.values.get("model_type") == "gemma3_text":
            # The single object of transformers 4 applies to layers without a window.
            by_kind = set(value) <= {_LOCAL, _GLOBAL}
            value = value.get(layers) or {} if by_kind else value if layers == _GLOBAL else {}
            written[number] = key, value
        if not isinstance(value, dict):
            fields.problem(f"{key} is {value!r}", "it must be an object or null")
            return {}
    if len(written) == 2 and written[0][1] != written[1][1]:
        fields.problem("rope_scaling and rope_parameters differ", "they mean the same: keep one")
    return written[0][1] if written else {}


def _number(fields: Fields, inner: Fields, key: str, outer_keys: tuple[str, ...], default: float) -> float:
    """A number inside the object or next to it. Versions disagree on precedence, so the two must be equal."""
    if not inner.has(key):
        return fields.number(outer_keys, default)
    value = inner.number(key)
    if fields.has(*outer_keys) and fields.number(outer_keys) != value:
        fields.problem(f"{key} is given twice, as {value:g} and {fields.look(outer_keys)!r}", "keep one")
    return value


def _read_scaling(fields: Fields, inner: Fields, max_positions: int) -> RopeScaling | None:
    kind = inner.look(("rope_type", "type"), "default")
    if not isinstance(kind, str) or kind not in _KEYS:
        inner.problem(f"type {kind!r} is not supported", did_you_mean(str(kind), _KEYS))
        return None
    stretched = kind != "default"
    known = _COMMON_KEYS | _KEYS[kind] | ({_ORIGINAL} if stretched else set())
    for key in sorted(set(inner.values) - known):
        inner.problem(f"type {kind!r} does not take {key!r}", "remove it, or correct the type")
    if not stretched:
        return None
    scaling: dict[str, Any] = {
        "kind": kind,
        "factor": inner.number("factor", least=1.0),
        "original_positions": _read_original(fields, inner, kind, max_positions),
    }
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if inner.has("low_freq_factor") and inner.has("high_freq_factor") and high <= low:
            inner.problem(f"high_freq_factor is {high:g}", f"it must exceed low_freq_factor, {low:g}")
        scaling |= {"low_frequency_factor": low, "high_frequency_factor": high}
    if kind == "yarn":
        scaling |= {
            "beta_fast": inner.optional_number("beta_fast", least=0.0) or 32.0,
            "beta_slow": inner.optional_number("beta_slow", least=0.0) or 1.0,
            "attention_factor": inner.optional_number("attention_factor", least=0.0),
            "mscale": inner.optional_number("mscale", least=0.0),
            "mscale_all_dim": inner.optional_number("mscale_all_dim", least=0.0),
            "truncate": inner.flag("truncate", True),
        }
    return RopeScaling.model_validate(scaling)


def _read_original(fields: Fields, inner: Fields, kind: str, max_positions: int) -> int:
    """The length before scaling. Linear and dynamic scaling only have the model's own."""
    outside = fields.whole(_ORIGINAL, max_positions, most=MOST_POSITIONS)
    original = inner.whole(_ORIGINAL, outside, most=MOST_POSITIONS)
    if fields.has(_ORIGINAL) and outside != original:
        fields.problem(f"{_ORIGINAL} is given twice, as {original} and {outside}", "keep one")
    if kind in ("linear", "dynamic") and original != max_positions:
        inner.problem(f"type {kind!r} does not take {_ORIGINAL!r}", "max_position_embeddings is what it uses")
    return original


def write_rope(model: Model, keys: RopeKeys) -> dict[str, Any]:
    """Top-level keys, which both versions read."""
    config: dict[str, Any] = {keys.theta[0]: model.rope_theta}
    if model.rope_fraction != 1.0 or keys.default_fraction != 1.0:
        config[keys.fraction[0]] = model.rope_fraction
    scaling = model.rope_scaling
    if scaling is None:
        return config
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("yarn", "llama3"):
        written[_ORIGINAL] = scaling.original_positions
    if scaling.kind == "llama3":
        written["low_freq_factor"] = scaling.low_frequency_factor
        written["high_freq_factor"] = scaling.high_frequency_factor
    if scaling.kind == "yarn":
        written |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.attention_factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return config | {"rope_scaling": {key: value for key, value in written.items() if value is not None}}
