"""The planner's page says what the code says; every scenario gives its textbook's family, or why another is better."""

from __future__ import annotations

import pytest
from tests.docs import scenarios


@pytest.fixture(scope="module")
def page() -> str:
    return scenarios.PAGE.read_text()


def test_the_page_is_what_the_planner_says(page: str) -> None:
    """If not: ``python -m tests.docs.scenarios``."""
    assert "<!-- scenarios -->" in page and "<!-- 405B -->" in page
    assert page == scenarios.written(page)


def test_every_scenario_has_a_verdict(page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for scenario in scenarios.SCENARIOS:
        (row,) = [line for line in rows if line.startswith(f"| {scenario.job}:")]
        last = row.split(" | ")[-1]
        # The family itself, a tie with it, or by how much it loses and to what.
        assert any(word in last for word in ("the same", "a tie", "slower;", "does not fit")), row
