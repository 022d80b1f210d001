"""Documents that launchers exchange: one written by each launcher, one by the leader for all.

A launcher needs only the latest document of another, so missing a message loses nothing, and decisions are functions of
the documents. Plain JSON.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.launch.failure import Death
from shoal.launch.report import FAILED


class Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Status(Document):
    """A launcher's report on its node."""

    name: str = Field(max_length=63)
    host: str
    process: int
    devices: int = Field(ge=0, le=1 << 16)  # how many ranks it has room for
    relay: str = ""  # where its neighbours send their heartbeats, if it is a relay head
    facts: dict[str, str] = {}  # what has to agree on all nodes: config, data, versions
    trouble: str = ""  # why it cannot take part: it does not see the leader's state
    beat: int = 0
    ready: int = 0  # it has no workers, and can join any round from this one on; 0: it has workers
    round: int = 0  # the last round it took part in, which the following fields describe
    deaths: tuple[Death, ...] = ()
    step: int = 0  # the step of its ranks when the last round ended
    failed: bool = False  # a rank has failed
    seen: dict[int, dict[str, Any]] = {}  # rank → its flight recorder's snapshot, if the leader asks
    still: int = 0  # 1: a rank has made no progress for a quarter of the stall limit; -1: not started
    stopped: bool = False  # one is stopped by a signal or a debugger
    standings: dict[int, dict[str, Any]] = {}  # rank → where it was found when the leader last asked
    answered: int = 0  # the number of the leader's question that this answers
    stop: bool = False  # it was asked to stop the run
    heard_end: bool = False


class Round(Document):
    """Which nodes take part in one attempt at the run, and in which layout. The first of ``nodes`` is the leader's
    own.
    """

    number: int = Field(ge=1)
    nodes: tuple[int, ...]
    attempt: str = Field(pattern=r"^[0-9a-f]{8}-[0-9]{1,9}$")  # part of paths: unique among all attempts
    set_aside: tuple[int, ...] = ()  # steps in nodes' memory that must not be resumed from
    layout: str
    cluster: dict[str, Any]


class End(Document):
    """The run is over on all nodes."""

    message: str
    code: int = FAILED
    uncommitted: bool = False  # stopped without a commit: memory may be newer than disk


class Announcement(Document):
    """What the leader tells all nodes."""

    beat: int = 0
    round: Round | None = None
    relays: bool = False  # relay heads forward the heartbeats of others
    details: bool = True  # nodes send what their ranks' recorders show, not only whether ranks progress
    over: int = 0  # rounds up to this are over: nodes that still have workers end them
    regroup: int = 0  # the round whose workers stop, with a commit, to make room for a node
    ask: int = 0  # number of questions so far about where ranks stand
    refused: dict[int, str] = {}
    end: End | None = None
