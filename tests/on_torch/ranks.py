"""Two gloo processes on loopback, started once and given jobs by any number of tests."""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANKS = 2
SECONDS = 60  # for the processes to come up, and for each job
NO_ANSWER = "no answer"


class Ranks:
    """Runs functions on every rank at once. A rank that fails ends both; the next job starts new ones."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(RANKS):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What `job(rank, *args)` returned on each rank. `job` is a function of a test module's top level."""
        answers = self.answers(job, *args)
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)
        return [result for result, _ in answers]

    def answers(self, job: Callable[..., Any], *args: Any) -> list[tuple[Any, str | None]]:
        """What each rank returned, or the text of its error."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((job, args))
        answers = [answer(pipe, self.seconds) for pipe in self.pipes]
        if any(error for _, error in answers):
            self.stop()
        return answers

    def stop(self, patience: float = 0) -> None:
        """End the processes: by force after `patience` seconds, for one may hang in a collective."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(patience)
            process.kill()
            process.join(5)
            process.close()
        self.processes, self.pipes = [], []


def answer(pipe: Any, seconds: float) -> tuple[Any, str | None]:
    """What a rank sent: a result, or an error's text."""
    try:
        return pipe.recv() if pipe.poll(seconds) else (None, NO_ANSWER)
    except EOFError:  # the process died, as gloo ends it if the ranks exchange different sizes
        return None, NO_ANSWER


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def serve(rank: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    limit = dt.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=limit)
    with contextlib.suppress(EOFError, OSError):  # the parent closed its end
        while True:
            job, args = pipe.recv()
            try:
                answer = job(rank, *args), None
            except BaseException:
                answer = None, traceback.format_exc()
            pipe.send(answer)
    os._exit(0)  # a process group that waits for a peer would hang on the way out
