"""Machines for tests of launchers: network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.launch.namespaces import NoNetwork, joined


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """Two machines with a cable between them, 10.77.0.1 and 2: the name of each by its node's."""
    yield from _machines("ab", "10.77.0")


@pytest.fixture
def star() -> Iterator[dict[str, str]]:
    """Three machines on one switch, 10.79.0.1 to 3."""
    yield from _machines("abc", "10.79.0")


def _machines(nodes: str, network: str) -> Iterator[dict[str, str]]:
    try:
        with joined(nodes, network) as names:
            yield names
    except NoNetwork as why:
        pytest.skip(str(why))
