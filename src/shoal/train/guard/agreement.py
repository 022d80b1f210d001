"""Check that all ranks were started for the same run before they form groups.

Ranks with different layouts would build different groups and deadlock in them, so this uses no collectives: each rank
puts a digest of its facts into the store, the first rank compares them, and all ranks read its verdict. The first of
every 64 ranks forwards the others' digests, so that no rank reads more than a few dozen messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist

from shoal.facts.config.file import flatten
from shoal.facts.problem import shorten
from shoal.parallel.gathered_texts import FAN
from shoal.parallel.signed_store import SignedStore

FACTS, DIGEST, VERDICT = "agreement/facts", "agreement/digest", "agreement/verdict"

# How long the first rank may take to compare, once it has everything.
COMPARING = timedelta(seconds=30)
# How much longer a rank that collects from several others waits, compared with each of them.
HANDING_ON = timedelta(seconds=5)

MOST_KEYS = 4
MOST_VALUES = 3
MOST_RANGES = 8
LONGEST_VALUE = 80


class Disagreement(RuntimeError):
    """Ranks were started with different facts. Raised on every rank, with the same message."""


class RankMissing(dist.DistError):
    """A rank did not arrive. A ``DistError``, like others that only report a peer's trouble."""


def agree(store: SignedStore, rank: int, world: int, facts: Mapping[str, str], timeout: timedelta) -> None:
    """Return when all ranks have the same facts, such as ``{"layout": …, "config": JSON}``; otherwise raise on all of
    them.

    ``store`` must hold nothing from an earlier attempt. Facts that are JSON objects are compared key by key.
    """
    text = json.dumps(dict(facts))
    digest = hashlib.sha256(text.encode()).hexdigest()
    # Equal facts are in the store once, however many ranks have them.
    store.set(f"{FACTS}/{digest}", text)
    told = _gather(store, rank, world, digest, timeout)
    if rank == 0:
        missing = [other for other in range(world) if other not in told]
        message = _absence(missing, world, timeout) if missing else _difference(store, told)
        store.set(VERDICT, json.dumps({"missing": bool(missing), "message": message}))
    else:
        _wait_for_verdict(store, world, timeout)
    verdict = json.loads(store.wait(VERDICT, COMPARING))
    if verdict["message"]:
        raise (RankMissing if verdict["missing"] else Disagreement)(verdict["message"])


# Waiting.


def _gather(store: SignedStore, rank: int, world: int, digest: str, timeout: timedelta) -> dict[int, str]:
    """On the first rank, the digests of all ranks that arrived in time; on others, those they have forwarded."""
    told, stride, patience = {rank: digest}, 1, timeout
    if rank == 0:
        store.set(f"{DIGEST}/0", "")  # for those that wait for it
    while stride < world:
        if rank % (stride * FAN):
            # Last of all, so that a reader of this key finds the facts as well.
            store.set(f"{DIGEST}/{stride}/{rank}", json.dumps(told))
            break
        others = range(rank + stride, min(rank + stride * FAN, world), stride)
        keys = [f"{DIGEST}/{stride}/{other}" for other in others]
        came = _came(store, keys, patience)
        for other, key in zip(others, keys, strict=True):
            if came or store.has(key):
                told |= _numbered(store.wait(key, COMPARING))
            else:
                # The forwarding rank is missing; the ranks behind it may have arrived.
                for one in range(other, min(other + stride, world)):
                    found = store.read(f"{DIGEST}/1/{one}")
                    told |= {} if found is None else _numbered(found)
        stride, patience = stride * FAN, patience + HANDING_ON
    return told


def _numbered(text: str) -> dict[int, str]:
    return {int(rank): digest for rank, digest in json.loads(text).items()}


def _wait_for_verdict(store: SignedStore, world: int, timeout: timedelta) -> None:
    # The first rank waits for the others in turn, and may have arrived after this one.
    if not _came(store, [f"{DIGEST}/0"], timeout) or not _came(store, [VERDICT], timeout + COMPARING):
        raise RankMissing(_absence([0], world, timeout))


def _came(store: SignedStore, keys: list[str], timeout: timedelta) -> bool:
    try:
        store.wait_for(keys, timeout)
    except dist.DistStoreError:
        return all(map(store.has, keys))  # also true if the last one arrived as we gave up
    return True


def _absence(missing: list[int], world: int, timeout: timedelta) -> str:
    return (
        f"{_named(missing)} of {world} did not start within {timeout.total_seconds():g} s. "
        f"fix: see logs/rank-{missing[0]:05d}.log; a larger fault.timeout if the machine is only slow"
    )


# Comparing.


def _difference(store: SignedStore, told: Mapping[int, str]) -> str:
    """Which ranks differ from the majority, and in what; empty if all agree."""
    world = len(told)
    ranks_of: dict[str, list[int]] = {}
    for rank, digest in sorted(told.items()):
        ranks_of.setdefault(digest, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    kinds = [
        (ranks, _leaves(json.loads(store.wait(f"{FACTS}/{digest}", COMPARING))))
        for digest, ranks in ranks_of.items()
    ]
    odd: set[int] = set()
    differences = []
    for key in dict.fromkeys(key for _, leaves in kinds for key in leaves):
        holders: dict[str, list[int]] = {}
        for ranks, leaves in kinds:
            holders.setdefault(leaves.get(key, "missing"), []).extend(ranks)
        if len(holders) > 1:
            # The majority first; ties go to the group with the lowest rank.
            ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), min(item[1])))
            odd.update(rank for _, ranks in ordered[1:] for rank in ranks)
            differences.append(f"{key} is {_spread(ordered)}")
    if not differences:
        return ""  # the same facts in a different order
    return (
        f"{_named(odd)} of {world} {'differs' if len(odd) == 1 else 'differ'} from the others: "
        f"{'; '.join(_capped(differences, MOST_KEYS))}. "
        "fix: start every rank with the same config, layout and versions"
    )


def _leaves(facts: dict[str, str]) -> dict[str, str]:
    """Every single value under its key: ``layout``, ``config recipe.lr``."""
    leaves: dict[str, str] = {}
    for name, text in facts.items():
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if isinstance(value, dict):
            leaves.update((f"{name} {key}", json.dumps(inner)) for key, inner in flatten(value).items())
        else:
            leaves[name] = text
    return leaves


# Messages.


def _spread(ordered: list[tuple[str, list[int]]]) -> str:
    """``dp=4 on ranks 0-1, 3 but tp=4 on rank 2``."""
    (usual, most), *others = ((shorten(value, LONGEST_VALUE), _named(ranks)) for value, ranks in ordered)
    return f"{usual} on {most} but " + ", ".join(
        _capped([f"{value} on {ranks}" for value, ranks in others], MOST_VALUES)
    )


def _named(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 0-1, 3``."""
    numbered = enumerate(sorted(ranks))
    # Consecutive ranks have a constant offset from their index in the list.
    runs = [[rank for _, rank in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    alone = len(runs) == 1 and len(runs[0]) == 1
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if alone else "ranks ") + ", ".join(_capped(texts, MOST_RANGES))


def _capped(texts: list[str], most: int) -> list[str]:
    return texts if len(texts) <= most else [*texts[:most], f"and {len(texts) - most} more"]
