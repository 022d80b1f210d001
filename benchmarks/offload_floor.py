"""What an offloaded update cannot be quicker than: its copies and the host's AdamW, with nothing else on the machine.

Gradients leave in bf16 and weights return in bf16 through pinned memory; 28 bytes a parameter are updated on all cores.
Each alone, and all together, as fast as they go beside one another. Of large models on fewer parameters, and scaled.
Prints a row as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.model.parameters import parameter_count
from shoal.facts.model.presets import PRESETS
from shoal.parallel.offload.host_memory import HostMemory
from shoal.prove.calibrate.host_update import HostState

MOST = 1_500_000_000  # elements that are measured
TIMES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    options = parser.parse_args()
    count = parameter_count(PRESETS[options.model])
    elements = min(count, MOST)
    found = {name: seconds * count / elements for name, seconds in measure(elements).items()}
    print(json.dumps({"layout": "floor", "elements": count, "measured_elements": elements, **found}))


def measure(elements: int) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory, threads = HostMemory(device), usable_threads()
    out, back = (memory.take(2 * elements).bytes for _ in range(2))
    here = [torch.zeros(2 * elements, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
    torch.set_num_threads(threads)
    state = HostState(elements, 2**18 * threads, threads)

    def copy(to: torch.Tensor, of: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            to.copy_(of)
            return
        with torch.cuda.stream(stream):
            to.copy_(of, non_blocking=True)

    def leave() -> None:
        copy(out, here[0], streams[0])

    def come_back() -> None:
        copy(here[1], back, streams[1])

    def together() -> None:
        leave()
        come_back()
        state.update()

    def seconds(work: Callable[[], None]) -> float:
        taken = []
        for _ in range(TIMES):
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    return {
        "leaving_s": seconds(leave),
        "returning_s": seconds(come_back),
        "update_s": seconds(state.update),
        "together_s": seconds(together),
    }


if __name__ == "__main__":
    main()
