"""The order in which the planner ranked layouts over a slow link is the order in which they were measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.record import RESULTS

ROWS = [json.loads(line) for line in (RESULTS / "shaped_link.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["time"])
def test_layouts_are_ranked_as_they_were_measured(row: dict[str, Any]) -> None:
    """If it is not: ``python benchmarks/shaped_link.py``, as root."""
    assert row["rate"] == "200mbit" and row["link"]["source"] == "gloo, 2 ranks of 2 nodes"
    # 200 Mbit/s are 25 MB/s, headers included.
    assert 20e6 < row["link"]["bandwidth"] < 25e6
    found = [one["layout"] for one in sorted(row["layouts"], key=lambda one: one["measured_s"])]
    planned = [one["layout"] for one in sorted(row["layouts"], key=lambda one: one["predicted_s"])]
    assert len(found) >= 4 and planned == found
