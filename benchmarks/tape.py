"""Tapes in PyTorch: record, replay, save, load, against copying the same bytes by hand.

Each pair runs in turn, many times. "By hand" is: for record and replay, a forward without a tape and a clone of each
routing; for save, a file written in one go, synced and renamed, and its folder synced; for load, a file read array by
array, and both keep what they have loaded: else the next one gets the memory of the last, or not, as it happens. Our
save and load also take the checksum of every byte. Record and replay are CPU time, save and load wait for the disk and
are wall time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from roundpipe_torch import Tape, checkpoint, record, replay, save_for_recompute

from ._rounds import timed
from ._rows import Row

DTYPES = (torch.int16, torch.int32, torch.int64)
LAYERS, TOKENS, TOP_K = 48, 32768, 8


def measure(dtype: torch.dtype, tokens: int, folder: Path, rounds: int) -> Iterator[Row]:
    routing_TK = [torch.randint(0, 128, (tokens, TOP_K), dtype=dtype) for _ in range(LAYERS)]
    x_T = torch.zeros(tokens)

    def layer(x_T: torch.Tensor, idx_TK: torch.Tensor) -> torch.Tensor:
        (idx_TK,) = save_for_recompute(idx_TK)
        return x_T

    def forward() -> None:
        for idx_TK in routing_TK:
            checkpoint(layer, x_T, idx_TK)

    def recorded() -> Tape:
        with record() as tape:
            forward()
        return tape

    def replayed() -> None:
        with replay(tape):
            forward()

    def cloning() -> list[torch.Tensor]:
        """A forward that keeps its routing without a tape."""
        forward()
        return [idx_TK.clone() for idx_TK in routing_TK]

    def passing() -> None:
        """A forward that makes a copy of its routing for each layer."""
        forward()
        for idx_TK in routing_TK:
            idx_TK.clone()

    tape, path, raw = recorded(), folder / "a.tape", folder / "raw"
    views = [memoryview(idx_TK.numpy()).cast("B") for idx_TK in routing_TK]
    sizes = [view.nbytes for view in views]

    def written() -> None:
        with open(folder / "new", "wb", buffering=0) as file:
            file.writelines(views)
            os.fsync(file.fileno())
        os.replace(folder / "new", raw)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)  # or the new name may be gone after a crash
        os.close(descriptor)

    def read() -> list[bytes]:
        with open(raw, "rb", buffering=0) as file:
            return [file.read(size) for size in sizes]

    written()
    tape.save(path)
    table = f"{LAYERS} layers, {tokens} tokens, top {TOP_K}, {dtype}".replace("torch.", "")
    kept: list[Any] = []

    def keeping(load: Callable[[], Any]) -> Callable[[], None]:
        return lambda: kept.append(load())

    pairs: tuple[tuple[str, Callable[[], Any], Callable[[], Any], Callable[[], float]], ...] = (
        ("record", recorded, cloning, time.process_time),
        ("replay", replayed, passing, time.process_time),
        ("save", lambda: tape.save(path), written, time.perf_counter),
        ("load", keeping(lambda: Tape.load(path)), keeping(read), time.perf_counter),
        ("load, mmap", keeping(lambda: Tape.load(path, mmap=True)), keeping(read), time.perf_counter),
    )
    for what, ours, by_hand, clock in pairs:
        ways = {"by hand": by_hand, "ours": ours}
        gated = ("ours",) if clock is time.process_time else ()  # a disk is another each day
        yield from timed(table, what, ways, "by hand", rounds, clock=clock, ours=gated, tolerance=0.25)
        kept.clear()
    beyond = path.stat().st_size - tape.nbytes()
    yield Row(table, "ours", "bytes of the file beyond the data", beyond, "B", tolerance=0.0)


def rows(quick: bool) -> Iterator[Row]:
    for dtype in DTYPES[:1] if quick else DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            yield from measure(dtype, 1024 if quick else TOKENS, Path(folder), 2 if quick else 15)
