"""Every question of practitioners is answered by its rule, and the page says what the planner says."""

from __future__ import annotations

import pytest
from tests.docs import questions
from tests.docs.questions import RULES, Question

# What is not so yet, by question: what is broken of it. A question that keeps its rules has no place here, and one that
# breaks another rule than said fails.
BROKEN: dict[str, set[str]] = {
    # Three answers, headroom and a finished search: plan/choose.py.
    **{question.id: {"three answers"} for question in questions.questions()},
    **{each: {"three answers", "headroom"} for each in ("q03", "q07", "q09", "q12", "q26", "q28")},
    "q10": {"three answers", "engine", "rule"},  # and QLoRA as a remedy
    "q15": {"three answers", "simplest within the bar", "rule"},
    "q16": {"three answers", "rule"},
    "q18": {"three answers", "headroom", "rule"},
    # Devices, sizes and instances by name: facts/cluster, facts/model.
    **{each: {"refused"} for each in ("q17", "q23", "q24", "q27")},
}


def test_every_question_has_a_rule() -> None:
    assert [question.id for question in questions.questions()] == [*RULES] and len(RULES) == 28


@pytest.mark.parametrize("question", questions.questions(), ids=lambda question: question.id)
def test_an_answer_keeps_its_rules_and_is_on_the_page(question: Question) -> None:
    """If it is not there: ``python -m tests.docs.questions``."""
    document = questions.answer(question)
    wrong = questions.broken(question, document)
    assert {name for name, _ in wrong} == BROKEN.get(question.id, set()), wrong
    assert questions.row(question, document) in questions.PAGE.read_text().splitlines()
