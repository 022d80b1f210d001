"""Questions that explanation, decision and scale are tried on; each is searched once a session."""

from __future__ import annotations

from functools import cache
from typing import Any

from shoal.facts.layout import Layout
from shoal.plan.judge import Plan, judge
from shoal.plan.report import PlanReport, plan_report
from shoal.plan.request import PlanRequest, plan_request


def asked(model: str, on: str, seq: int = 4096, batch: int = 64, **others: Any) -> PlanRequest:
    return plan_request(model, on, seq=seq, batch=batch, **others)


@cache
def answered(
    model: str, on: str, seq: int = 4096, batch: int = 64, top: int = 10, **others: Any
) -> PlanReport:
    return plan_report(asked(model, on, seq, batch, **others), top)


@cache
def judged(
    layout: str, model: str = "llama3-8b", on: str = "8xH100", seq: int = 4096, batch: int = 64
) -> Plan:
    return judge(asked(model, on, seq, batch).workload(Layout.parse(layout)))
