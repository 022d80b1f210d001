"""Save a plan as a config that ``shoal train`` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from shoal.facts import support
from shoal.facts.config import Config
from shoal.facts.config.paths import seen_from
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.facts.problem import BadInput, Problem
from shoal.plan.choose import Chosen
from shoal.plan.decide import duration
from shoal.plan.explain import GIB
from shoal.plan.judge import Plan, judge
from shoal.plan.request import PlanRequest


def saved(asked: PlanRequest, chosen: Chosen | None, folder: Path) -> tuple[str, Plan]:
    """The text of a config in ``folder`` and its plan: the chosen layout, or the requested one."""
    plan = chosen.plan if chosen else None
    if asked.layout is not None:
        plan = judge(asked.workload(asked.layout))
    if plan is None or not plan.fits or not plan.runs:
        what = f"--save: no layout that the engine runs fits {asked.cluster}"
        raise BadInput(Problem(what, "more GPUs; shoal plan without --save says how many"))
    return _text(tables(asked, plan.layout, folder), plan), plan


def refuse(asked: PlanRequest) -> None:
    """Raise ``BadInput`` if the engine cannot run the request in any layout."""
    tables(asked, asked.layout or Layout())


def tables(asked: PlanRequest, layout: Layout, folder: Path = Path()) -> dict[str, Any]:
    """The non-default tables of a config, checked against what the engine runs."""
    is_preset = asked.model_name.lower() in presets.PRESETS
    model: dict[str, Any] = (
        {"preset": asked.model_name} if is_preset else {"path": seen_from(folder, asked.model_name)}
    )
    on = str(asked.cluster)
    if asked.lora is not None:
        model["lora"] = asked.lora.model_dump(exclude_none=True)
    recipe = {
        "seq": asked.recipe.seq,
        "batch": asked.recipe.batch,
        **asked.recipe.model_dump(exclude_defaults=True),
    }
    if asked.tokens is not None:
        del recipe["steps"]  # implied by the tokens
    found = {
        "layout": str(layout),
        "model": model,
        "recipe": recipe,
        "cluster": {"on": seen_from(folder, on) if on.lower().endswith(".toml") else on},
    }
    problems = support.missing(Config.model_validate(found), asked.model, layout)
    if problems:
        raise BadInput(problems)
    return found


def _text(found: dict[str, Any], plan: Plan) -> str:
    memory = plan.memory
    head = [
        "# Written by shoal plan. Values not listed here keep their defaults; shoal config show lists them all.",
        f"# Predicted: {duration(plan.step.seconds)}/step ± {plan.error_bar:.0%}, "
        f"{plan.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"{memory.peak_allocated / GIB:.3g} GiB allocated of {memory.capacity / GIB:.3g}.",
        "# The planner chose only the layout: set the learning rate, the length of the run and the data yourself.",
        "",
        "",
    ]
    return "\n".join(head) + tomli_w.dumps(found)
