"""The questions that practitioners ask, the planner's answers, and the rules that these keep.

``python -m tests.docs.questions`` writes docs/questions.md. The questions, their rules and what experts did are data:
benchmarks/data/questions.csv. Every answer is what the command prints, so a rule is checked where a person meets it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.scenarios import block

from shoal.cli.main import main
from shoal.facts.layout import Layout
from shoal.plan.complexity import parts
from shoal.plan.decide import duration
from shoal.plan.request import plan_request

ROOT = Path(__file__).parents[2]
DATA = ROOT / "benchmarks" / "data" / "questions.csv"
PAGE = ROOT / "docs" / "questions.md"
GIB = 2**30
# Of running out of memory, the probability that a plan may have which is chosen.
RISK = 0.001
# What the table leaves open.
COMMANDS = {
    "q20": "plan llama3-8b --on benchmarks/data/four_hosts.toml --seq 4096 --batch 64",
    "q28": "plan llama3-8b --on 8xA100-80GB --on 8xH100 --on 8xMI300X --seq 8192 --batch 64 --tokens 100B --price 2",
}

Document = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A row of the table."""

    id: str
    question: str
    command: str
    rule: str
    experts: str
    source: str


def questions() -> list[Question]:
    with DATA.open(newline="", encoding="utf-8") as file:
        rows = [[*row.values()] for row in csv.DictReader(file)]
    return [Question(row[0], row[1], COMMANDS.get(row[0], row[2]), *row[3:]) for row in rows]


def answer(question: Question) -> Document:
    """What the command prints with ``--json``, without this machine's GPUs and calibration."""
    words = [*shlex.split(question.command), "--json", "--no-calibration"]
    out = io.StringIO()
    before, visible = Path.cwd(), os.environ.get("CUDA_VISIBLE_DEVICES")
    os.chdir(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            main(words)
    except SystemExit:
        pass
    finally:
        os.chdir(before)
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    document: Document = json.loads(out.getvalue())
    return document


# What an answer says, in pieces.


def layout_of(document: Document) -> Layout:
    return Layout.parse(document["chosen"]["layout"])


def chosen_plan(document: Document) -> Document:
    (plan,) = [plan for plan in document["plans"] if plan["layout"] == document["chosen"]["layout"]]
    return dict(plan)


def answers(document: Document) -> bool:
    return bool(document.get("chosen", {}).get("layout"))


def told(document: Document) -> str:
    """All that is said in words."""
    decision = document["decision"]
    remedies = [remedy["what"] for remedy in document["remedies"]]
    return " ".join([decision["text"], *decision["reasons"], *remedies])


# The rule of each question: what it breaks, in words.


def degrees(**wanted: Callable[[int], bool]) -> Callable[[Document], Iterator[str]]:
    """Of the layout that is chosen."""

    def check(document: Document) -> Iterator[str]:
        if not answers(document):
            yield "nothing is chosen"
            return
        layout = layout_of(document)
        for axis, holds in wanted.items():
            if not holds(getattr(layout, axis)):
                yield f"{axis}={getattr(layout, axis)}"

    return check


def one(value: int) -> bool:
    return value == 1


def several(value: int) -> bool:
    return value > 1


def eight(value: int) -> bool:
    return value == 8


def within_a_node(value: int) -> bool:
    return value <= 8


def across_nodes(value: int) -> bool:
    return value > 8


def says(*words: str) -> Callable[[Document], Iterator[str]]:
    """At least one of these."""

    def check(document: Document) -> Iterator[str]:
        if not any(word.lower() in told(document).lower() for word in words):
            yield f"it does not say {' or '.join(words)}"

    return check


def fits_or_says(document: Document) -> Iterator[str]:
    if not answers(document) and not document["remedies"]:
        yield "nothing fits, and nothing is said that would"


def no_offload(document: Document) -> Iterator[str]:
    if not answers(document) or layout_of(document).offload:
        yield "nothing fits without offload"


def context_and_recompute(document: Document) -> Iterator[str]:
    yield from degrees(cp=several)(document)
    if answers(document) and layout_of(document).recompute == "none":
        yield "nothing is recomputed"


def little_traffic(document: Document) -> Iterator[str]:
    """No axis that exchanges activations within a layer, and most of the step is not spent waiting."""
    yield from degrees(tp=one, cp=one)(document)
    if answers(document):
        plan = chosen_plan(document)
        if plan["step"]["exposed_comm"] > plan["step"]["seconds"] / 2:
            yield f"{plan['step']['exposed_comm'] / plan['step']['seconds']:.0%} of the step waits for the network"


def batches_offered(document: Document) -> Iterator[str]:
    offered = {offer["batch"] for offer in (document["decision"]["batch"] or {"offers": []})["offers"]}
    if not offered or not offered <= {64, 96, 128}:
        yield f"offered are {sorted(offered)}"


def one_process_on_a_cpu(document: Document) -> Iterator[str]:
    if document["cluster"]["device"] != "cpu" or "One process on the CPU" not in told(document):
        yield "it does not say CPU"
    if not answers(document) or layout_of(document).world > 1:
        yield "it is more than one process"


def number_with_its_error_bar(document: Document) -> Iterator[str]:
    number = document["how_many"]
    if not number or not number["low"] < number["needed"] < number["high"]:
        yield "no number, or no error bar"


def half_precision(document: Document) -> Iterator[str]:
    if document["recipe"]["precision"] != "fp16":
        yield f"it trains in {document['recipe']['precision']}"


def one_table(document: Document) -> Iterator[str]:
    rows = document.get("compared", [])
    if len(rows) != 3 or not all(row["days"] and row["cost"] and row["kwh"] for row in rows):
        yield "not three clusters with days, cost and energy"


def something(document: Document) -> Iterator[str]:
    if not answers(document):
        yield "it does not answer"


RULES: dict[str, Callable[[Document], Iterator[str]]] = {
    "q01": degrees(fsdp=one, tp=one, cp=one, pp=one, ep=one, dp=eight),
    "q02": degrees(tp=one, pp=one, cp=one),
    "q03": degrees(tp=one, pp=one, cp=one),
    "q04": degrees(pp=one),
    "q05": degrees(pp=one),
    "q06": fits_or_says,
    "q07": says("offload", "LoRA"),
    "q08": fits_or_says,
    "q09": no_offload,
    "q10": says("QLoRA"),
    "q11": degrees(tp=within_a_node),
    "q12": something,  # headroom is asked of all
    "q13": degrees(tp=eight),
    "q14": degrees(cp=several),
    "q15": degrees(tp=eight),
    "q16": degrees(ep=several),
    "q17": degrees(ep=across_nodes, tp=one),
    "q18": context_and_recompute,
    "q19": degrees(cp=several),
    "q20": little_traffic,
    "q21": says("the batch is the limit"),
    "q22": batches_offered,
    "q23": something,
    "q24": something,
    "q25": one_process_on_a_cpu,
    "q26": number_with_its_error_bar,
    "q27": half_precision,
    "q28": one_table,
}


# What is asked of every answer: by name, what it breaks.

Broken = tuple[str, str]


def general(document: Document) -> Iterator[Broken]:
    """The engine runs it, it leaves headroom, and nothing simpler is as fast as far as can be told."""
    chosen = document["chosen"]
    if not chosen["runs"]:
        yield "engine", "the engine does not run it"
    if missing := {"simplest", "fastest", "safest"} - chosen.keys():
        yield "three answers", f"no answer is named {' or '.join(sorted(missing))}"
    elif chosen["simplest"] != chosen["layout"]:
        yield "three answers", "what is chosen is not the simplest"
    if document["cluster"]["device"] == "cpu":
        return
    plan = chosen_plan(document)
    if not leaves_headroom(plan):
        yield "headroom", f"it runs out of memory with a probability of {plan['out_of_memory']:.1%}"
    yield from _simplest(document, plan)


def leaves_headroom(plan: Document) -> bool:
    return bool(plan["out_of_memory"] <= RISK)


def _simplest(document: Document, plan: Document) -> Iterator[Broken]:
    """Of all plans that are shown, run, leave the headroom, cut no short sequences and offload nothing needlessly."""
    seq, batch = document["recipe"]["seq"], document["recipe"]["batch"]
    rivals = [
        each
        for each in document["plans"]
        if each["fits"]
        and each["support"] == "runs"
        and leaves_headroom(each)
        and ("offload=" in plan["layout"] or "offload=" not in each["layout"])
        and (each["degrees"]["cp"] == 1 or seq >= 4096 * each["degrees"]["cp"])
    ]
    fastest = min([plan, *rivals], key=lambda each: float(each["step"]["seconds"]))
    limit = fastest["step"]["seconds"] * (1 + fastest["told_apart"])
    if plan["step"]["seconds"] > limit:
        yield "simplest within the bar", f"{fastest['layout']} is faster by more than its error bar"
    asked = plan_request(document["model"]["name"], document["cluster"]["name"], seq=seq, batch=batch)

    def count(layout: str) -> int:
        return len(parts(asked.workload(Layout.parse(layout))))

    for each in rivals:
        if each["step"]["seconds"] <= limit and count(each["layout"]) < count(plan["layout"]):
            yield "simplest within the bar", f"{each['layout']} is as fast and simpler"


def broken(question: Question, document: Document) -> list[Broken]:
    """Everything that is wrong with an answer; nothing, where it keeps its rules."""
    if "problems" in document:
        return [("refused", document["problems"][0]["what"])]
    found = list(general(document)) if answers(document) else []
    return found + [("rule", what) for what in RULES[question.id](document)]


# The page.


def said(question: Question, document: Document) -> str:
    """An answer in a cell."""
    if "problems" in document:
        return f"refused: {document['problems'][0]['what']}"
    pieces = []
    if document.get("compared"):
        rows = [
            f"{row['cluster']}: `{row['layout']}`, {row['days']:.3g} days, {row['cost']:,.0f}, {row['kwh']:,.0f} kWh"
            for row in document["compared"]
        ]
        return "; ".join(rows)
    if document["how_many"]:
        pieces.append(document["how_many"]["text"])
    if answers(document):
        pieces.append(_chosen(document))
    else:
        pieces.append(document["decision"]["text"])
    if advice := document["decision"]["batch"]:
        pieces.append(advice["text"])
    if document["remedies"]:
        pieces.append("or " + "; ".join(remedy["what"] for remedy in document["remedies"]))
    return "; ".join(pieces)


def _chosen(document: Document) -> str:
    plan = chosen_plan(document)
    memory = plan["memory"]
    if document["cluster"]["device"] == "cpu":
        return "one process on the CPU"
    name = f"`{plan['layout']}`"
    if document["recipe"]["precision"] != "bf16":
        name += f" in {document['recipe']['precision']}"
    free = (memory["capacity"] - memory["device_p90"]) / GIB
    return (
        f"{name}: {duration(plan['step']['seconds'])}/step ± {plan['error_bar']:.0%}, "
        f"{plan['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {free:.0f} of {memory['capacity'] / GIB:.0f} GiB free"
    )


def row(question: Question, document: Document) -> str:
    wrong = [what for _, what in broken(question, document)]
    kept = "kept" if not wrong else f"**broken**: {'; '.join(wrong)}"
    cells = (
        question.id,
        f"{question.question}<br>`shoal {question.command}`",
        said(question, document),
        f"{question.rule}: {kept}",
        f"{question.experts} ({question.source})" if question.source != "–" else question.experts,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


HEAD = "| | question | the planner | rule | experts |\n|---|---|---|---|---|"


def written(page: str) -> str:
    rows = [row(question, answer(question)) for question in questions()]
    return block("questions", "\n".join([HEAD, *rows]), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
