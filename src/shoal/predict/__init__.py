"""Predict cost. Never imports torch. Callable: ``shoal.predict("llama3-8b", …)``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.predict.library import Prediction


class _Room(ModuleType):
    """A module that answers a call, so that ``shoal.predict`` is both the room and the library's function."""

    def __call__(
        self, model: Any, on: Any, layout: Any, *, seq: int, batch: int, **recipe: Any
    ) -> Prediction:
        """Memory and time of a step in one layout. ``recipe``: further fields of a recipe; bf16 unless said."""
        from shoal.predict.library import predict

        return predict(model, on, layout, seq=seq, batch=batch, **recipe)


sys.modules[__name__].__class__ = _Room
