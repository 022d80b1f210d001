"""Which parts of which tensors a checkpoint contains for an optimizer's states, given the recipe.

Names and shapes are Hugging Face's, except for Adafactor's row and column means and for block scales (int8): these
belong to canonical matrices, because a Hugging Face tensor may be several of ours (fused projections) or a transposed
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from shoal.facts.blockwise import SCALES
from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import views_by_parameter
from shoal.facts.model.parameters import by_name, llama_parameters
from shoal.facts.optimizers import AVERAGE, OF_MATRICES, RULES, Rule, factor_shape, rule_of, states_of
from shoal.facts.recipe import Recipe

# Offset and shape of a part of a tensor.
StoredBox = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Keeps:
    """The recipe fields that decide which parameters have which states."""

    optimizer: Rule = "adamw"
    average: bool = False
    blockwise: bool = False  # AdamW's moments of matrices are 8-bit codes with scales
    groups: tuple[tuple[str, bool], ...] = ()  # name patterns, and whether matches are frozen

    @classmethod
    def of(cls, recipe: Recipe) -> Keeps:
        groups = tuple((group.match, group.frozen) for group in recipe.groups) if recipe.freezes else ()
        return cls(recipe.optimizer, recipe.ema > 0, recipe.blockwise, groups)

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> Keeps:
        """From a checkpoint's stored identity; raises ValueError if it is not one of ours."""
        optimizer = identity.get("recipe.optimizer", "adamw")
        if optimizer not in RULES:
            raise ValueError(f"no optimizer is called {optimizer!r}")
        blockwise = identity.get("recipe.states") == "int8" and identity.get("recipe.precision") != "fp64"
        try:
            groups = [
                (str(one["match"]), bool(one.get("frozen"))) for one in identity.get("recipe.groups") or ()
            ]
        except (AttributeError, KeyError, TypeError):
            raise ValueError("recipe.groups is no list of groups") from None
        frozen = tuple(groups) if any(still for _, still in groups) else ()
        return cls(optimizer, bool(identity.get("recipe.ema")), blockwise, frozen)

    def states(self, name: str, dimensions: int) -> tuple[str, ...]:
        """The states of a canonical parameter."""
        if self.frozen(name):
            return ()
        scales = SCALES if self.has_blocks(name, dimensions) else ()
        return (*states_of(self.optimizer, name, dimensions), *scales, *((AVERAGE,) if self.average else ()))

    def frozen(self, name: str) -> bool:
        """Whether a canonical parameter is frozen: the first matching pattern decides."""
        return next((still for match, still in self.groups if fnmatchcase(name, match)), False)

    def has_blocks(self, name: str, dimensions: int) -> bool:
        """Whether its moments are in 8 bits."""
        return self.blockwise and dimensions >= 2 and rule_of(self.optimizer, name, dimensions) == "adamw"

    @property
    def alike(self) -> bool:
        """Whether all parameters have the same states."""
        return self.optimizer not in ("muon", "adafactor") and not self.blockwise and not self.groups


def expected_states(model: Model, keeps: Keeps) -> tuple[str, ...]:
    """All states that any parameter has."""
    found = (keeps.states(one.name, len(one.shape)) for one in llama_parameters(model))
    return tuple(dict.fromkeys(state for states in found for state in states))


@lru_cache(maxsize=16)
def stored_boxes(model: Model, keeps: Keeps, state: str) -> dict[str, list[StoredBox]]:
    """By tensor, the parts that have this state."""
    views, found = views_by_parameter(model), dict[str, list[StoredBox]]()
    for one in llama_parameters(model):
        if state not in keeps.states(one.name, len(one.shape)):
            continue
        if state in OF_MATRICES:
            shape = factor_shape(one.shape, state)
            found[one.name] = [((0,) * len(shape), shape)]
            continue
        for view in views[one.name]:
            found.setdefault(view.tensor, []).append((view.tensor_offset, view.shape))
    return found


def factored_shape(model: Model, state: str, name: str) -> tuple[int, ...] | None:
    """The shape of a canonical matrix's row or column means, or of its scales; None if there is no such matrix."""
    found = by_name(model).get(name)
    return None if found is None or len(found.shape) < 2 else factor_shape(found.shape, state)
