"""A curve in a terminal, in braille dots: eight per character."""

from __future__ import annotations

from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def plotted(values: Sequence[float | None], width: int, height: int, plain: bool = False) -> list[str]:
    """``height`` lines of ``width`` characters with the whole curve, smallest values at the bottom; ``plain``: in
    ASCII.
    """
    known = [value for value in values if value is not None]
    if not known or width < 1 or height < 1:
        return [" " * max(0, width)] * max(0, height)
    least, most = min(known), max(known)
    across, down = (width, height) if plain else (2 * width, 4 * height)
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column in range(across):
        inside = values[
            column * len(values) // across : max(
                (column + 1) * len(values) // across, column * len(values) // across + 1
            )
        ]
        here = [value for value in inside if value is not None]
        if not here:
            continue
        rows = [
            round((most - value) / (most - least or 1.0) * (down - 1)) for value in (max(here), min(here))
        ]
        first, last = rows
        if before is not None and not plain:  # keep the line unbroken
            first, last = min(first, before), max(last, before)
        before = rows[1]
        for row in range(first, last + 1):
            if plain:
                cells[row][column] = 1
            else:
                cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    if plain:
        return ["".join("*" if cell else " " for cell in line) for line in cells]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]
