"""Torch's own checkpoint, and the others made like it, which run their part again by themselves."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint

__all__ = [
    "CALLS",
    "LABEL",
    "Part",
    "before_hooks",
    "in_backward_of_others",
    "in_forward_of_others",
    "innermost",
    "is_ours",
    "is_torchs",
    "leave",
    "part_of",
    "parts_around",
    "unseen",
]

innermost: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks for saved tensors that are in force, two functions."""

LABEL = "torch.utils.checkpoint"
_Pack = TypeVar("_Pack", bound=Callable[..., Any])
CALLS = ("checkpoint", "_checkpoint_impl")
"""What the function is called that calls a part for the first time. The second since torch 2.14."""
_REENTRANT = "CheckpointFunction"
"""What torch, fairscale, DeepSpeed and Megatron call the `autograd.Function` of the kind that keeps no hooks."""


def is_torchs(hooks: Any) -> bool:
    """Whether hooks for saved tensors are those of torch's own checkpoint."""
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_ours(hooks: Any) -> bool:
    """Whether they are those of a region or of a decision."""
    return hooks is not None and (getattr(hooks[1], "__module__", None) or "").startswith(_OURS)


_OURS = __name__.partition(".")[0]


def unseen(pack: _Pack) -> _Pack:
    """Let selective policies of torch (since 2.14) take `pack` for a hook of a checkpoint, and not of the user.

    What a policy keeps goes through hooks of the user, or is warned about.
    """
    hook: Any = pack
    hook._checkpoint_internal, hook._user_hooks = True, None
    return pack


@contextlib.contextmanager
def before_hooks(pack: Callable[..., Any]) -> Iterator[Any]:
    """A hook like `pack`, behind which such a policy finds those that are in force now.

    Only for the time of this: autograd holds the hook, and what that holds would never be collected.
    """
    hook: Any = unseen(partial(pack))
    torchs: Any = checkpoint  # since 2.14
    hook._user_hooks = torchs._current_user_saved_tensors_hooks()
    try:
        yield hook
    finally:
        hook._user_hooks = None


class Part:
    """A part that torch's own checkpoint runs twice, in one of its phases.

    Torch's object for it has what we note of it, which so lives as long.
    """

    __slots__ = ("_known", "_notes", "backward")

    def __init__(self, torchs: Any, backward: Any) -> None:
        self._notes: _Notes = vars(torchs).setdefault("_roundpipe", _Notes())
        self._known = _closure(torchs.recompute_fn)
        self.backward = backward
        """The one that runs it again; None in its forward."""

    @property
    def label(self) -> Any:
        """What it calls."""
        return self._known.get("fn", LABEL)

    @property
    def devices(self) -> Sequence[int] | None:
        """Those whose random numbers it repeats, besides the CPU; None if it does not even repeat the CPU's."""
        return self._known.get("fwd_devices", ()) if self._known.get("preserve_rng_state") else None

    @property
    def generators(self) -> Any:
        """Those of its forward."""
        return None if self._notes.first is None else self._notes.first.generators

    @property
    def slot(self) -> Any:
        """What its forward decided; None if that had no region."""
        return None if self._notes.first is None else self._notes.first.slot

    def is_same(self, other: Part | None) -> bool:
        """Whether the other is this part, in whatever phase."""
        return other is not None and other._notes is self._notes

    def run(self) -> Any:
        """The run that stands for it in this phase; None if there is none yet."""
        if self.backward is None:
            return self._notes.first
        backward, run = self._notes.last
        return run if backward == self.backward else None

    def belongs_to(self, run: Any) -> None:
        """Let `run` be that one."""
        if self.backward is None:
            self._notes.first = run
        else:
            self._notes.last = self.backward, run


class _Notes:
    """Of one part, in all its phases."""

    first: Any = None  # the run of its forward
    last: tuple[Any, Any] = None, None  # a backward, and the run in that


def part_of(hooks: Any) -> Part | None:
    """The part that hooks of torch's own checkpoint are for."""
    if not is_torchs(hooks):
        return None
    known = _closure(inspect.unwrap(hooks[0]))
    if "frame" in known:
        return Part(known["frame"], None)
    return Part(known["target_frame_ref"](), known["gid"])


def _closure(function: Any) -> dict[str, Any]:
    """The variables of a function's closure that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def parts_around(hooks: Any, region: Collection[CodeType]) -> Iterator[Part]:
    """The parts that this code is in, the innermost first, up to a region or to a backward.

    Hooks of the innermost know it. The others, and where another library's hooks are in between, are found by who
    called whom.
    """
    if hooks is None or is_ours(hooks):
        return
    first = part_of(hooks)
    if first is not None:
        yield first
        if first.backward is not None:
            return
    frame = _caller()
    while frame is not None and frame.f_code not in region:
        part = _part_at(frame)
        if part is not None:
            if not part.is_same(first):
                yield part
            if part.backward is not None:
                return
        frame = frame.f_back


def _part_at(frame: FrameType) -> Part | None:
    """The part that torch's code in `frame` runs, for the first time or again."""
    if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == checkpoint.__file__:
        return Part(frame.f_locals["frame"], frame.f_locals["gid"])
    begun = _begun(frame)
    part = begun and begun.gi_frame and begun.gi_frame.f_locals.get("new_frame")
    return Part(part, None) if part else None


def leave(error: BaseException) -> None:
    """Leave the parts that `error` has come out of.

    Torch 2.11 would leave them when nobody holds the traceback any more, whatever runs then.
    """
    hooks = innermost(False)
    if not is_torchs(hooks):
        return
    begun = [_begun(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    for part in reversed(begun):
        if part is not None:
            part.close()


def _caller() -> FrameType | None:
    return sys._getframe(2)


def _begun(frame: FrameType) -> Any:
    """The generator that runs before and after a part, where `frame` is that of the function which calls both."""
    code = frame.f_code
    if code is _MODULE_IS_CALLED:
        return _begun_by_hooks(frame.f_locals["self"]) if _COMPOSABLE in sys.modules else None
    is_call = code.co_name in CALLS and code.co_filename == checkpoint.__file__
    return frame.f_locals.get("gen") if is_call else None


_MODULE_IS_CALLED = torch.nn.Module._call_impl.__code__
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"


def _begun_by_hooks(module: torch.nn.Module) -> Any:
    """The same of a module that begins and ends a part by hooks of its own, while it is in its forward."""
    composable: Any = sys.modules[_COMPOSABLE]
    if sys.modules["torch.distributed._composable.contract"].STATE_KEY not in vars(module):
        return None
    state = composable.checkpoint.state(module)
    return state._ac_generator if state is not None and state.enable_hook else None


def in_forward_of_others(region: Collection[CodeType]) -> bool:
    """Whether a reentrant checkpoint runs here for the first time, inside the code of a region; without gradient."""
    return _runs(f"{_REENTRANT}.forward", region)


def in_backward_of_others() -> bool:
    """Whether a reentrant checkpoint runs its part again, here; in a backward."""
    return _runs(f"{_REENTRANT}.backward", ())


def _runs(name: str, until: Collection[CodeType]) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in until:
        if frame.f_code.co_qualname == name:
            return True
        frame = frame.f_back
    return False
