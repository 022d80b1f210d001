"""Documents that launchers exchange: one written by each launcher, one by the leader for all.

Whatever a launcher needs to know is in the last document of another, so that nothing is lost with a message that was
not heard, and what is decided is a function of what they say. Plain JSON.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.launch.failure import Death
from shoal.launch.report import FAILED


class Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Status(Document):
    """What a launcher says of its node."""

    name: str = Field(max_length=63)
    host: str
    process: int
    devices: int = Field(ge=0, le=1 << 16)  # for how many ranks it has room
    relay: str = ""  # where its neighbours tell it their beats, if they do
    facts: dict[str, str] = {}  # what has to be the same on all nodes: config, data, versions
    trouble: str = ""  # why it can take no part: it does not see the state that the leader writes
    beat: int = 0
    ready: int = 0  # it has no workers, and takes part in any round from this one on; 0: it has some
    round: int = 0  # the last one that it took part in; what follows is of that one
    deaths: tuple[Death, ...] = ()
    step: int = 0  # that its ranks were in when the last round ended
    failed: bool = False  # some rank did not end well
    seen: dict[int, dict[str, Any]] = {}  # rank → what its flight recorder shows, if the leader asks
    still: int = 0  # 1: a rank of it has made no progress for a quarter of the stall limit; -1: not begun
    stopped: bool = False  # a signal or a debugger has stopped one of them
    standings: dict[int, dict[str, Any]] = {}  # rank → where it was found when the leader last asked
    answered: int = 0  # which question of the leader's that answers
    stop: bool = False  # it was asked to stop the run
    heard_end: bool = False


class Round(Document):
    """Who takes part in one attempt at the run, and in which layout. The first of ``nodes`` is the leader's own."""

    number: int = Field(ge=1)
    nodes: tuple[int, ...]
    attempt: str = Field(
        pattern=r"^[0-9a-f]{8}-[0-9]{1,9}$"
    )  # part of paths: what no other attempt was ever called
    set_aside: tuple[int, ...] = ()  # steps in the memory of nodes that it must not continue from
    layout: str
    cluster: dict[str, Any]


class End(Document):
    """The run is over on all nodes."""

    message: str
    code: int = FAILED
    uncommitted: bool = False  # stopped without a commit: what is in memory may be newer than what is on disk


class Announcement(Document):
    """What the leader says to all."""

    beat: int = 0
    round: Round | None = None
    relays: bool = False  # some pass on the beats of others
    details: bool = True  # nodes tell what the recorders of their ranks show, not only whether ranks progress
    over: int = 0  # rounds up to this have ended: a node that still has workers ends them
    regroup: int = 0  # the round whose workers stop, with a commit, to make room for a node
    ask: int = 0  # counts the questions where ranks stand
    refused: dict[int, str] = {}
    end: End | None = None
