"""Files that are read or written as a whole: only regular ones, and never half of one."""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from io import BytesIO, FileIO

from ._errors import TapeError, message

__all__ = ["Path", "opened", "read_at", "read_exactly", "replacing", "set_out", "write_all"]

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_PART = 1 << 30  # no system takes more than 2 GiB in one call
_PARTS = 512  # nor more pieces
_seeking = threading.Lock()


def opened(path: Path) -> FileIO:
    """`path`, for reading. A link is followed; a pipe, a device or a folder is refused without waiting for it."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = -1
    try:
        descriptor = os.open(path, flags)
        _refuse_irregular(path, os.fstat(descriptor))
        return FileIO(descriptor, "rb")
    except BaseException:
        if descriptor != -1:
            os.close(descriptor)
        raise


def read_exactly(file: FileIO | BytesIO, size: int) -> bytes:
    """The next `size` bytes; fewer only where the file ends."""
    whole = file.read(min(size, _PART))
    if len(whole) == size:
        return whole
    parts = [whole]
    missing = size - len(whole)
    while missing and parts[-1]:
        parts.append(file.read(min(missing, _PART)))
        missing -= len(parts[-1])
    return b"".join(parts)


def read_at(file: FileIO, begin: int, size: int) -> memoryview:
    """`size` bytes from `begin` on; fewer only where the file ends. Several threads may do so."""
    first = _read_part(file, begin, size)
    if len(first) == size:
        return memoryview(first)
    memory = memoryview(bytearray(size))
    at, part = 0, first
    while part:
        memory[at : at + len(part)] = part
        at += len(part)
        part = _read_part(file, begin + at, size - at)
    return memory[:at].toreadonly()


def _read_part(file: FileIO, begin: int, size: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), min(size, _PART), begin)
    with _seeking:  # Windows
        file.seek(begin)
        return file.read(min(size, _PART))


def set_out(file: FileIO, begin: int, end: int) -> None:
    """Have the system begin to write these bytes to the disk, so that it works beside what comes next."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux can be told so, by saying that nobody reads them
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


def write_all(file: FileIO | BytesIO, parts: Iterable[memoryview | bytes]) -> None:
    """Write `parts` one after the other, in as few steps as the system takes: it keeps large ones in large pages."""
    rest = collections.deque(memoryview(part).cast("B") for part in parts)
    while rest:
        written = _write_some(file, list(itertools.islice(rest, _PARTS)))
        while rest and written >= rest[0].nbytes:
            written -= rest.popleft().nbytes
        if written:
            rest[0] = rest[0][written:]


def _write_some(file: FileIO | BytesIO, parts: list[memoryview]) -> int:
    if isinstance(file, FileIO) and hasattr(os, "writev"):
        return os.writev(file.fileno(), parts)
    return file.write(parts[0][:_PART])


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """A new file that takes the place of `path` once the block has ended well and all is on the disk.

    A crash in between leaves what was there. A link stays a link; the mode and, where allowed, the owner of an old
    file stay as they were. What the system refuses names `path`: of the file that is written first nobody has heard.
    """
    name = os.fsdecode(path)
    if not name:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if not os.path.basename(name):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    target = os.path.realpath(name)
    before = _status(target)
    if before is not None:
        _refuse_irregular(path, before)
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "the file may not be written", name)
    temporary = os.path.join(os.path.dirname(target), f".tape-{secrets.token_hex(8)}.tmp")
    try:
        with FileIO(temporary, "xb") as file:
            if before is not None:
                _become(temporary, before)
            yield file
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, name) from error
        raise
    _sync_folder(os.path.dirname(target))


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _become(path: str, before: os.stat_result) -> None:
    with contextlib.suppress(OSError, AttributeError):  # the owner: only for those who may, where there is one
        os.chown(path, before.st_uid, before.st_gid)
    os.chmod(path, stat.S_IMODE(before.st_mode) & 0o777)


def _sync_folder(path: str) -> None:
    """Make the new name as lasting as the file; where folders cannot be synced, it is so already."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor := os.open(path, os.O_RDONLY))
        os.fsync(descriptor)


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kinds = [(stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket")]
    kind = next((name for test, name in kinds if test(status.st_mode)), "a device")
    raise TapeError(message(f"{os.fsdecode(path)}: {kind}, not a file.", [], "give the path of a regular file."))
