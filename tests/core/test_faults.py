"""Faults: interrupts at any line, killed writers, full disks, many threads, depth."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundpipe_core import (
    SlotError,
    Tape,
    doing_recompute,
    get_recompute_data,
    layer_scope,
    recompute_once,
    record,
    replay,
    save_for_recompute,
)
from roundpipe_core import _backend as backends
from roundpipe_core._phase import Run, open_slot, thread
from roundpipe_core._slots import AutoLabel, Taken
from tests.fuzz import TIMES
from tests.interrupts import At, lines, raised_at, some

ROOT = Path(__file__).parents[2]


def layer(label: str, function: Any) -> Any:
    """A region, made by hand."""
    before = thread.run
    phase, slot = open_slot(label)
    try:
        thread.run = Run(phase, slot)
        return function()
    finally:
        thread.run = before


def decide() -> Any:
    with layer_scope("gate"):
        (index,) = save_for_recompute(np.arange(5), name="index")
    return index, recompute_once(lambda: 7), doing_recompute()


def step(folder: Path) -> Any:
    """Record, save, load, replay."""
    with record() as tape:
        layer("moe", decide)
        save_for_recompute("outside")
    tape.save(folder / "a.tape")
    with replay(Tape.load(folder / "a.tape")):
        return layer("moe", decide), save_for_recompute("mine")


def files_open() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit, GeneratorExit])
def test_an_error_at_any_line_comes_through_and_leaves_nothing(error: Any, tmp_path: Path) -> None:
    step(tmp_path)
    want, count, before = repr(step(tmp_path)), lines(lambda: step(tmp_path)), files_open()
    whole = (tmp_path / "a.tape").read_bytes()
    for n in some(count, 30, start=TIMES):
        raised_at(n, error, lambda: step(tmp_path))
        assert thread.run is None, f"line {n}"
        assert list(tmp_path.iterdir()) == [tmp_path / "a.tape"], f"line {n}"
        assert (tmp_path / "a.tape").read_bytes() == whole, f"line {n}"
        assert repr(step(tmp_path)) == want, f"line {n}"
    gc.collect()
    assert files_open() <= before


def test_a_block_interrupted_at_any_line_is_closed() -> None:
    def blocks() -> Any:
        with record() as tape:
            save_for_recompute(1)
        with replay(tape):
            return save_for_recompute(2)

    for n in range(1, lines(blocks) + 1):
        at = At(n)
        try:
            with at:
                assert blocks() == (1,)
        except KeyboardInterrupt as raised:
            at.came_through(raised)
        assert thread.run is None, f"line {n}"


# Writers that end before their file does

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from roundpipe_core import Tape, record, replay, save_for_recompute
from tests.interrupts import At, lines, some

def tape(n):
    with record() as tape:
        save_for_recompute(np.full(3000, n), "value %d" % n)
    return tape

def held(path):
    with replay(Tape.load(path)):
        array, text = save_for_recompute(np.zeros(3000, int), "")
    assert (array == int(text.split()[1])).all()
    return int(array[0])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

path = Path(sys.argv[1]) / "a.tape"
one, two = tape(1), tape(2)
one.save(path)
found = set()
count = lines(lambda: two.save(path))
for n in (*some(count, 40, start=int(sys.argv[2])), count):  # in its last line it is in place
    one.save(path)
    child = os.fork()
    if not child:
        with At(n, die):
            two.save(path)
        os._exit(0)
    os.waitpid(child, 0)
    found.add(held(path))
left = [name for name in os.listdir(sys.argv[1]) if name != "a.tape"]
assert all(name.startswith(".tape-") and name.endswith(".tmp") for name in left), left
print(sorted(found), len(left) > 0)
"""


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, args)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_a_writer_killed_anywhere_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    done = run(KILLED, tmp_path, random.randrange(1000))
    assert done.stdout == "[1, 2] True\n", done.stdout + done.stderr


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from roundpipe_core import Tape, record, save_for_recompute

path = Path(sys.argv[1]) / "a.tape"
def tape(size):
    with record() as tape:
        save_for_recompute(np.zeros(size))
    return tape
tape(10).save(path)
whole = path.read_bytes()
for limit in (0, 10, 400, 5000, 79_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        tape(10_000).save(path)
    except OSError as error:
        assert "too large" in str(error)
    else:
        print("no error at", limit)
assert path.read_bytes() == whole
assert [one.name for one in path.parent.iterdir()] == ["a.tape"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tape(10_000).save(path)
print("right")
"""


def test_a_disk_that_is_full_at_any_point_leaves_the_old_file_alone(tmp_path: Path) -> None:
    done = run(FULL, tmp_path)
    assert done.stdout == "right\n", done.stdout + done.stderr


def test_a_folder_that_goes_away_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with record() as tape:
        save_for_recompute(np.arange(3))
    with pytest.raises(FileNotFoundError):
        tape.save(tmp_path / "none" / "a.tape")
    folder, sync = tmp_path / "some", os.fsync
    folder.mkdir()

    def goes(descriptor: int) -> None:
        shutil.rmtree(folder)
        sync(descriptor)

    before = files_open()
    monkeypatch.setattr(os, "fsync", goes)
    with pytest.raises(FileNotFoundError):
        tape.save(folder / "a.tape")
    monkeypatch.undo()
    assert files_open() == before
    tape.save(tmp_path / "a.tape")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    with record() as tape:
        save_for_recompute(np.arange(3))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            tape.save(tmp_path / "a.tape")
    finally:
        tmp_path.chmod(0o700)


# Threads


def test_threads_record_and_replay_each_for_itself(tmp_path: Path) -> None:
    barrier, interval = threading.Barrier(16), sys.getswitchinterval()

    def work(n: int) -> Any:
        barrier.wait(timeout=60)
        folder = tmp_path / str(n)
        folder.mkdir()
        return [repr(step(folder)) for _ in range(3)]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(work, range(16)))
    finally:
        sys.setswitchinterval(interval)
    assert got == [[repr(step(tmp_path))] * 3] * 16


def test_a_frontend_registered_while_another_thread_looks_is_found_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Array:
        pass

    class Late(backends._NumpyArrays):
        def owns(self, value: Any) -> bool:
            return isinstance(value, Array)

    class Slow(backends._NumpyArrays):
        """While it is asked, another thread registers."""

        def owns(self, value: Any) -> bool:
            if len(backends._frontends) == 1:
                backends.register_backend(late)
            return False

    late: Any = Late()
    monkeypatch.setattr(backends, "_frontends", [Slow()])
    monkeypatch.setattr(backends, "_by_type", {})
    backends.backend_of(Array())
    assert backends.backend_of(Array()) is late


# Depth and length


def test_two_hundred_scopes_and_regions_in_each_other() -> None:
    def down(depth: int) -> Any:
        if depth:
            with layer_scope("down"):
                return layer("level", lambda: down(depth - 1))
        return save_for_recompute(np.arange(3))[0] + doing_recompute()

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    try:
        with record() as tape:
            down(200)
        with replay(tape):
            assert down(200).tolist() == [1, 2, 3]
    finally:
        sys.setrecursionlimit(limit)
    with pytest.raises(RecursionError), record():
        down(2000)
    assert thread.run is None


@pytest.mark.parametrize("label", ["level", "of another framework"])  # found by the label, found by the order
def test_many_regions_in_a_row_are_found_without_looking_through_all(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, looks = 2000, []
    with record() as tape:
        for n in range(count):
            layer(AutoLabel("level"), lambda n=n: save_for_recompute(n))
    monkeypatch.setattr(Taken, "__contains__", lambda taken, slot: looks.append(1) or set.__contains__(taken, slot))
    with replay(tape):
        assert all(layer(AutoLabel(label), lambda: save_for_recompute(0)) == (n,) for n in range(count))
    assert len(looks) <= 4 * count


@pytest.mark.parametrize("kind", [list, tuple, dict])
@pytest.mark.parametrize("levels", [1000, 100_000])
def test_data_nested_too_deep_is_a_clear_error(kind: Any, levels: int) -> None:
    data: Any = 1
    for _ in range(levels):
        data = {"in": data} if kind is dict else kind((data,))
    with pytest.raises(SlotError, match="nested too deep"):
        layer("moe", lambda: save_for_recompute(data))
    assert thread.run is None


# Tasks


def test_a_block_left_open_by_a_task_that_was_cancelled_is_closed() -> None:
    async def waits() -> None:
        with record():
            save_for_recompute(1)
            await asyncio.sleep(9)

    async def main() -> Any:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return thread.run, save_for_recompute(2)

    assert asyncio.run(main()) == (None, (2,))
    with pytest.raises(AssertionError):
        get_recompute_data()
