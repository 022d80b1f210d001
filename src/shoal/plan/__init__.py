"""Choose a layout. Never imports torch. Callable: ``shoal.plan("llama3-8b", "8xH100", …)``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.plan.report import PlanReport


class _Room(ModuleType):
    """A module that answers a call, so that ``shoal.plan`` is both the room and the library's function."""

    def __call__(
        self, model: Any, on: Any, *, seq: int, batch: int, top: int = 10, curve: bool = False, **others: Any
    ) -> PlanReport:
        """What ``shoal plan`` says. ``others``: layout, lora, tokens, price, and fields of a recipe."""
        from shoal.plan.report import plan_report
        from shoal.plan.request import plan_request

        return plan_report(plan_request(model, on, seq=seq, batch=batch, **others), top, curve)


sys.modules[__name__].__class__ = _Room
