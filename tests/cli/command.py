"""A command of the line, run in this process."""

from __future__ import annotations

import pytest

from shoal.cli.main import main

Capture = pytest.CaptureFixture[str]


def shoal_(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()
