"""How unevenly tokens spread over ranks that hold different experts: the busiest of them sets the pace."""

from __future__ import annotations

# Times an even share, of a micro-batch and layer. An assumption, for no run of many expert ranks was measured here: a
# router that balances by a correction keeps single experts within some 4 % over whole batches (DeepSeek's loss-free
# balancing), one that balances by a loss alone lets the busiest have half as much again, and a rank's several experts
# even out some of what a micro-batch adds to that.
BUSIEST = 1.1


def busiest(ep: int) -> float:
    """What the busiest of ``ep`` ranks is sent, in even shares. A rank that has all experts has all their tokens."""
    return BUSIEST if ep > 1 else 1.0
