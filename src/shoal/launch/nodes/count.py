"""Number of nodes of a run: fixed, or minimum and maximum. Needs no torch."""

from __future__ import annotations

import re
import socket
from typing import Any, NamedTuple

from shoal.facts.config import Config
from shoal.facts.config.paths import of_any_place
from shoal.facts.problem import BadInput

# Config fields that are specific to one machine: its network interface and where it caches data.
OF_ONE_NODE = {"cluster": {"interface"}, "data": {"cache"}}


def of_all_nodes(config: Config) -> dict[str, Any]:
    """The part of a config that must agree on all nodes. Shared files may be mounted at different paths: their
    content is compared.
    """
    return of_any_place(config.model_dump(mode="json", exclude=OF_ONE_NODE))


class NodeCount(NamedTuple):
    """A run starts and continues with at least ``least`` nodes, and accepts more up to ``most``."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> NodeCount:
        """``4``, or ``2:4``."""
        first, _, second = text.partition(":")
        try:
            count = cls(int(first), int(second or first))
        except ValueError:
            count = cls(0, 0)
        if not 1 <= count.least <= count.most:
            raise BadInput(f"--nodes {text}: not a number of nodes", "--nodes 4, or from 2 to 4: --nodes 2:4")
        return count

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


def node_name(given: str | None) -> str:
    """This machine's name: part of paths, and shown in messages."""
    name = given if given is not None else socket.gethostname()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise BadInput(f"--node {name}: letters, digits, '.', '-' and '_' alone", "--node a")
    return name
