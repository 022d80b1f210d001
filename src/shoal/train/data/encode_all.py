"""Encode every task: in this process, in worker processes, or on the nodes of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor, as_completed

from shoal.train.data.encode import Encoded, EncodeTask, encode, open_once
from shoal.train.data.tokenizers import Tokenizer

INLINE_BYTES = 32 << 20  # below this, starting processes takes longer than the work


def encode_all(
    tasks: list[EncodeTask],
    tokenizer: Tokenizer,
    tokenizer_text: str,
    end_token: str | None,
    workers: int,
    progress: Callable[[int, int], None] | None,
    ray: str | None = None,
) -> list[Encoded]:
    """Every task's result, in task order. Small inputs are encoded in this process.

    ``ray``: the address of a Ray cluster, whose nodes do the work.
    """
    total, done = sum(task.bytes for task in tasks), 0
    results: dict[int, Encoded] = {}
    if ray is not None:
        from shoal.train.data.ray_engine import encode_on_ray

        encoded = encode_on_ray(tasks, tokenizer, tokenizer_text, end_token, ray)
    elif workers <= 1 or len(tasks) == 1 or total <= INLINE_BYTES:
        encoded = ((task, encode(task, tokenizer)) for task in tasks)
    else:
        encoded = _encode_in_pool(tasks, min(workers, len(tasks)), tokenizer_text, end_token)
    for task, result in encoded:
        results[task.number] = result
        done += task.bytes
        if progress:
            progress(done, total)
    return [results[task.number] for task in tasks]


def _encode_in_pool(
    tasks: list[EncodeTask], workers: int, tokenizer_text: str, end_token: str | None
) -> Generator[tuple[EncodeTask, Encoded]]:
    # spawn, not fork: the caller may have threads and a GPU.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        waiting = {pool.submit(_encode_in_worker, task, tokenizer_text, end_token): task for task in tasks}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_in_worker(task: EncodeTask, tokenizer_text: str, end_token: str | None) -> Encoded:
    return encode(task, open_once(tokenizer_text, end_token))


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes already provide the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End when the parent is killed; a pool's workers would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
