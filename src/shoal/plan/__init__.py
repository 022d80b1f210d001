"""Choose a layout. Never imports torch. Callable: ``shoal.plan("llama3-8b", "8xH100", …)``."""

from __future__ import annotations

from shoal.facts.callable_package import make_callable

make_callable(__name__, "shoal.plan.report:plan")
