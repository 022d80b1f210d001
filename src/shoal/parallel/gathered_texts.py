"""Gather texts of all ranks on the first rank through the store, so that no rank reads more than a few dozen messages.

The first of every 64 ranks gathers their texts and passes them on together; so does the first of every 4,096.
"""

from __future__ import annotations

import json
from datetime import timedelta

from shoal.parallel.signed_store import SignedStore

FAN = 64


def gather_texts(
    store: SignedStore,
    rank: int,
    world: int,
    key: str,
    text: str,
    patience: timedelta,
    series: str | None = None,
    fan: int = FAN,
) -> list[str]:
    """Every rank's text in rank order, on the first rank; an empty list elsewhere.

    ``series``: see ``SignedStore.set``, for keys that are reused again and again.
    """
    every, stride = [text], 1
    while stride < world:
        if rank % (stride * fan):
            store.set(f"{key}/{rank}", json.dumps(every), series)
            return []
        others = range(rank + stride, min(rank + stride * fan, world), stride)
        for told in store.wait_for([f"{key}/{other}" for other in others], patience):
            every += json.loads(told)
        stride *= fan
    return every
