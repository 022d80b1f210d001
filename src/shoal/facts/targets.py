"""What a target says where there is nothing to predict. Data writes it, the loss leaves it out."""

from __future__ import annotations

from typing import Final

IGNORE: Final = -100
