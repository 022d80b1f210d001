"""What tests of plans share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.facts.strategies import BY_NAME


@pytest.fixture
def without_params() -> Iterator[None]:
    """An engine that does not run ``offload=params``: today it runs nearly all that is planned."""
    offload = BY_NAME["offload"]
    unrun = offload.unrun
    object.__setattr__(offload, "unrun", ("params", *unrun))
    yield
    object.__setattr__(offload, "unrun", unrun)
