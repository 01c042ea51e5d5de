"""A function on several ranks: processes of their own, which talk by Gloo."""
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 120                         # seconds


def on_ranks(count: int, function: Callable, *args: Any) -> Any:
    """What `function(rank, *args)`, which can be found by its name, returns on rank 0. It must not raise anywhere."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        every = [context.Process(target=_run, args=(rank, count, meeting, answers, function, args))
                 for rank in range(count)]
        for process in every:
            process.start()
        try:
            said = dict(answers.get(timeout=PATIENCE) for _ in every)
        finally:
            for process in every:
                process.kill()
                process.join()
    for rank, (ended_well, answer) in sorted(said.items(), key=lambda item: item[1][0]):
        assert ended_well, f"rank {rank}: {answer}"
    return said[0][1]


def _run(rank: int, count: int, meeting: str, answers: Any, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count,
                                timeout=timedelta(seconds=PATIENCE / 4))
        answers.put((rank, (True, function(rank, *args))))
    except Exception:
        answers.put((rank, (False, traceback.format_exc())))
    answers.close()
    answers.join_thread()
