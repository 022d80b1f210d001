"""Every question of practitioners is answered by its rule, and the page says what the planner says."""

from __future__ import annotations

import pytest
from tests.docs import questions
from tests.docs.questions import RULES, Question


def test_every_question_has_a_rule() -> None:
    assert [question.id for question in questions.questions()] == [*RULES] and len(RULES) == 28


# Searches that take several seconds each.
LARGE = ("q12", "q13", "q14", "q15", "q17", "q26")


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(one, marks=pytest.mark.long if one.id in LARGE else (), id=one.id)
        for one in questions.questions()
    ],
)
def test_an_answer_keeps_its_rules_and_is_on_the_page(question: Question) -> None:
    """If it is not there: ``python -m tests.docs.questions``."""
    document = questions.answer(question)
    wrong = questions.broken(question, document)
    assert not wrong, wrong
    assert questions.row(question, document) in questions.PAGE.read_text().splitlines()
