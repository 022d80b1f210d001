"""The target value that marks positions without a target. Data writes it, the loss ignores it."""

from __future__ import annotations

from typing import Final

IGNORE: Final = -100
