"""Predict cost. Never imports torch. Callable: ``shoal.predict("llama3-8b", …)``."""

from __future__ import annotations

from shoal.facts.callable_package import make_callable

make_callable(__name__, "shoal.predict.library:predict")
