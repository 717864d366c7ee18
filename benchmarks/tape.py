"""What a tape costs, against copying the same bytes by hand: record, replay, save, load.

    python benchmarks/tape.py [--layers 48] [--tokens 32768] [--top-k 8] [--json FILE]

Each pair is run in turn, many times; the table has the medians. "By hand" is: for record and replay, a forward without
a tape and a clone of each routing; for save, a file written in one go, synced and renamed; for load, a file read in one
go. Save and load also take the checksum of every byte, on other cores where there are some; it has a line of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundpipe_torch import Tape, checkpoint, record, replay, save_for_recompute

DTYPES = (torch.int16, torch.int32, torch.int64)


def medians(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, held in zip((first, second), times, strict=True):
            began = time.perf_counter()
            function()
            held.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(dtype: torch.dtype, layers: int, tokens: int, top_k: int, folder: Path, repeats: int) -> dict[str, Any]:
    routing_TK = [torch.randint(0, 128, (tokens, top_k), dtype=dtype) for _ in range(layers)]
    x_T = torch.zeros(tokens)

    def layer(x_T: torch.Tensor, idx_TK: torch.Tensor) -> torch.Tensor:
        save_for_recompute(idx_TK)
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

    def kept() -> list[torch.Tensor]:
        return [idx_TK.clone() for idx_TK in routing_TK]

    def dropped() -> None:
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

    def read() -> list[bytes]:
        with open(raw, "rb", buffering=0) as file:
            return [file.read(size) for size in sizes]

    def summed() -> list[int]:
        return [zlib.crc32(view) for view in views]

    written()
    tape.save(path)
    plain, recording = medians(forward, recorded, repeats)
    keeping, _ = medians(kept, forward, repeats)
    dropping, replaying = medians(dropped, replayed, repeats)
    raw_save, save = medians(written, lambda: tape.save(path), repeats)
    raw_load, load = medians(read, lambda: Tape.load(path), repeats)
    checksum = medians(summed, summed, repeats)[0]
    return {
        "bytes": tape.nbytes(),
        "bytes of the file beyond that": path.stat().st_size - tape.nbytes(),
        "forward": plain,
        "record": (recording, plain + keeping),
        "replay": (replaying, plain + dropping),
        "save": (save, raw_save),
        "load": (load, raw_load),
        "checksum": checksum,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"{options.layers} layers, {options.tokens} tokens, top {options.top_k}; milliseconds, and those by hand")
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            sizes = (options.layers, options.tokens, options.top_k)
            row = results[str(dtype)] = measure(dtype, *sizes, Path(folder), options.repeats)
        print(f"{dtype!s:12s} {row['bytes'] / 1e6:6.1f} MB + {row['bytes of the file beyond that']} bytes in the file")
        for name in ("record", "replay", "save", "load"):
            ours, by_hand = row[name]
            print(f"  {name:8s} {1e3 * ours:8.1f}   by hand {1e3 * by_hand:8.1f}   {ours / by_hand:6.2f} x")
        print(f"  checksum {1e3 * row['checksum']:8.1f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
