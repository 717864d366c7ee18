"""Which tensor of the recompute stands for which tensor of the forward (R10).

A *pack* is one tensor handed to autograd's saved-tensor hook, described by a `Saved`. A *segment* is the packs between
two points that both phases pass and between which they may part: a question for the phase, a save, an inner region.

Two segments are *aligned* if they made the same packs at the same autograd nodes, counted from the segment's start,
and, once the layer asked for its phase, in the same lines. In an aligned segment the same code ran: position decides.
(While the recompute is under way, they must begin at the same point too: a loop makes segments that look the same.)
Where they are not, only what is alive counts: what the forward dropped (a gate that only decided) no backward can ask
for. The packs alive when each phase returned are matched by the line that made them, and what is left by order.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import call
from types import CodeType, FrameType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch

from roundpipe_core._places import is_ours

from ._errors import user_line
from ._notes import Notes

node_count: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Autograd nodes that this thread has made."""

A_LEAF = 2**64 - 1
"""The number of every node that takes a leaf's gradient."""

_LOWER = frozenset({torch.float16, torch.bfloat16})
"""What autocast makes of weights. It keeps each cast, for all threads, until an outermost autocast ends."""


def cast_of(node: Any) -> torch.Tensor | None:
    """The leaf that `node` converts. Such a node saves nothing, and autocast gives one to many: see `_LOWER`."""
    if node is None or node.name() != "ToCopyBackward0":
        return None
    found: torch.Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return found


__all__ = [
    "A_LEAF",
    "REGION",
    "Pairs",
    "Saved",
    "Trace",
    "cast_of",
    "cheap_tail",
    "line_of",
    "match",
    "match_aligned",
    "node_count",
    "node_names",
    "other_layout",
    "region_codes",
]

REGION = object()
"""A point: an inner region has ended."""

Pairs = dict[int, int]
"""Index of a forward pack to the index of the recompute's pack that stands for it."""


class Saved(NamedTuple):
    """What is known of one pack without reading its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    node: int  # autograd nodes made since the segment began
    line: int | None  # which line ran, and by which calls; None until the layer asks for its phase

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"

    def alike(self, other: Saved) -> bool:
        """Whether one could stand for the other by its metadata."""
        return self[:3] == other[:3]


_Pack = tuple[torch.Size, torch.dtype, torch.device, int, int | None]
"""A `Saved` that nobody has asked for yet: one that has names takes twice as long to make."""

Leaf = tuple[int, int, ref[torch.Tensor]]
"""A weight or other leaf of the graph that was saved: its identity, its version, and itself.

In this order, so that two of them can be compared: the values of tensors are never.
"""


# What most traces never change. Not to be written to.
_NONE: dict[Any, Any] = {}
_FIRST_START = [0]
_FIRST_POINT: list[tuple[Any, int]] = [(None, 0)]


class Trace:
    """The packs of one run, and where its segments begin."""

    live: Sequence[int] = ()
    """Packs alive when the run was over."""
    places: list[str] | None = None
    told_at = -1
    """Nodes made before the layer learned its phase; -1: it does not know."""
    _untold: int = sys.maxsize
    """Packs before that."""
    _of: Trace | None = None
    _regions = 0
    """That have ended."""
    _bases: list[tuple[int, int]] | None = None
    """From which pack on the nodes are counted from where, if not all from `base`."""
    makers: dict[int, tuple[str, int]] = _NONE
    """Name and place of the node that made each pack, once told."""
    layouts: dict[int, tuple[int, ...]] = _NONE
    """Strides of each pack, once told."""
    constants: dict[int, tuple[ref[torch.Tensor], int]] = _NONE
    """Tensors without gradient that the forward saved, and their versions then."""
    standing: dict[tuple[int, int], tuple[str, int]] = _NONE
    """Makers of what stands for outputs of another node."""

    def __init__(self, debug: bool, locating: bool, of: Trace | None = None) -> None:
        """`of`: the forward's, for a recompute."""
        self.refs: list[Any] = []  # weak references to the holders
        self.packs: list[_Pack] = []
        self.starts, self.points = _FIRST_START, _FIRST_POINT
        """Where each segment begins: the last point that both phases know, and how often the layer asked since."""
        self.base = self.begun = node_count()
        self.leaves: dict[int, Leaf] = {}
        self._located_from: int = sys.maxsize  # the first pack of which the place is noted
        if of is not None:
            self._of, self._located_from = of, of._untold
        if debug:
            self.places, self._located_from = [], 0
        if locating:
            self.told_at = self._untold = self._located_from = 0

    def _count_from(self, base: int) -> None:
        """Count nodes from here."""
        if self._bases is None:
            self._bases = [(0, self.base)]
        self.base = base
        self._bases.append((len(self.packs), base))

    def told(self) -> None:
        """The layer knows its phase: from now on note which line makes a pack."""
        if self.told_at < 0:
            self.told_at, self._untold = node_count() - self.begun, len(self.packs)
            self._located_from = min(self._located_from, self._untold)

    def add(self, holder: Any, tensor: torch.Tensor) -> int:
        """Note a pack. Returns its number."""
        packs, dtype = self.packs, tensor.dtype
        n = len(packs)
        self.refs.append(ref(holder))
        if tensor.requires_grad:
            if tensor.is_leaf:
                self.leaves[n] = id(tensor), tensor._version, ref(tensor)
            elif (base := tensor._base) is not None or dtype in _LOWER:
                self._weight(n, tensor if base is None else base)
        elif self._of is None:
            self._constant(n, tensor)
        nodes, line = node_count() - self.base, self._located(n, tensor) if n >= self._located_from else None
        try:
            packs.append((tensor.shape, dtype, tensor.device, nodes, line))
        except RuntimeError:
            if not tensor.is_nested:  # such a one has no shape, if it is strided
                raise
            shape = torch.Size(tensor._nested_tensor_size().flatten().tolist())
            packs.append((shape, dtype, tensor.device, nodes, line))
        return n

    def _weight(self, n: int, whole: torch.Tensor) -> None:
        """Note the weight that pack `n` is a view or a cast of: a linear layer saves such, and under autocast so."""
        weight = whole if whole.is_leaf else cast_of(whole.grad_fn)
        if weight is not None:
            self.leaves[n] = id(weight), weight._version, ref(weight)

    def _constant(self, n: int, tensor: torch.Tensor) -> None:
        if self.constants is _NONE:
            self.constants = {}
        self.constants[n] = ref(tensor), tensor._version

    def _located(self, n: int, tensor: torch.Tensor) -> int | None:
        """The line that makes pack `n`, if the layer knows its phase."""
        if self.places is not None:
            self.places.append("at " + user_line())
        if self.told_at < 0 and self._of is not None and n >= self._of._untold:
            self.told_at = self._of.told_at  # the forward asked here, if only for a log
        return None if self.told_at < 0 else self._origin(n, tensor)

    def number(self, pack: int) -> int:
        """Of the node that saves a pack."""
        base = self.base
        if self._bases is not None:
            base = self._bases[bisect_right(self._bases, (pack, sys.maxsize)) - 1][1]
        return base + self.packs[pack][3] - 1

    def witness(self, tensor: torch.Tensor) -> None:
        """Note a pack for its layout or version alone: one of a region inside, or one that nothing is matched with."""
        if self.told_at >= 0:
            self.add(self, tensor)
        elif not tensor.requires_grad:
            self._constant(len(self.constants), tensor)

    def _origin(self, n: int, tensor: torch.Tensor) -> int:
        """Note what made pack `n`, and how it lies in memory. Returns its line."""
        if self.layouts is _NONE:
            self.makers, self.layouts = {}, {}
        node = tensor.grad_fn
        if node is not None:
            made = self.maker(tensor) if self.standing else (node.name(), node._sequence_nr() - self.begun)
            if made is not None:
                self.makers[n] = made
        if tensor.layout is torch.strided and not tensor.is_nested:
            pairs = zip(tensor.stride(), tensor.shape, strict=True)
            self.layouts[n] = tuple(stride for stride, size in pairs if size > 1)
        return _line()

    def maker(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Name and place of the node that made `tensor`."""
        node = tensor.grad_fn
        if node is None:
            return None
        number = node._sequence_nr()
        standing = self.standing.get((number, tensor.output_nr)) if self.standing else None
        return standing or (node.name(), number - self.begun)

    def stand_in(self, outputs: Sequence[torch.Tensor], makers: Sequence[tuple[str, int]]) -> None:
        """Take `outputs` for made by the nodes `makers`, which this run leaves out."""
        if self.standing is _NONE:
            self.standing = {}
        for output, maker in zip(outputs, makers, strict=False):
            if output.grad_fn is not None:
                self.standing[output.grad_fn._sequence_nr(), output.output_nr] = maker

    def skip(self, nodes: int) -> None:
        """Leave out nodes that a recompute made in the midst of this run."""
        self._count_from(self.base + nodes)
        self.begun += nodes

    def changed(self) -> dict[int, torch.Tensor]:
        """Of the tensors without gradient those that were written to since, by pack."""
        found = {}
        for n, (reference, version) in self.constants.items():
            tensor = reference()
            if tensor is not None and tensor._version != version:
                found[n] = tensor
        return found

    def position(self, pack: int) -> tuple[int, int]:
        """The segment of a pack, and its place there."""
        segment = bisect_right(self.starts, pack) - 1
        return segment, pack - self.starts[segment]

    def rank(self, number: int) -> int:
        """How many packs there are up to the node of this number, counted from the begin."""
        return sum(self.number(pack) <= self.begun + number for pack in range(len(self.packs)))

    def told_of(self, pack: int) -> str:
        """A pack of the forward, for messages."""
        return f"{self.saved(pack)}, saved by the forward as number {pack}"

    def saved(self, pack: int) -> Saved:
        """What is known of a pack."""
        return Saved(*self.packs[pack])

    def line(self, pack: int) -> int | None:
        """The line that made a pack."""
        return self.packs[pack][4]

    def listed(self, which: Sequence[int]) -> str:
        """Packs in words, a line each."""
        places = self.places or [""] * len(self.packs)
        lines = [f"    {n}: {self.saved(n)} {places[n]}".rstrip() for n in which[:_MOST_LISTED]]
        if len(which) > _MOST_LISTED:
            lines.append(f"    and {len(which) - _MOST_LISTED} more")
        return "\n".join([f"{len(which)} tensors", *lines])

    def split(self, point: Any = None) -> None:
        """Begin a segment: from here on the other phase may run other code. `point`: see `Run.consulted`."""
        if self.starts is _FIRST_START:
            self.starts, self.points = [*_FIRST_START], [*_FIRST_POINT]
        known, asked = self.points[-1]
        if point is REGION:
            self._regions += 1
            point = REGION, self._regions
        self.points.append((known, asked + 1) if point is None else (point, 0))
        self.starts.append(len(self.packs))
        self._count_from(node_count())

    def segments(self) -> list[tuple[int, int]]:
        """Begin and end of each segment."""
        return list(pairwise([*self.starts, len(self.packs)]))

    def finished(self) -> None:
        """Note what is alive now."""
        self.live = self.alive()

    def alive(self) -> list[int]:
        """Packs whose holder something still holds."""
        if all(map(call, self.refs)):
            return [*range(len(self.refs))]
        return [n for n, holder in enumerate(self.refs) if holder() is not None]


_SMALL, _FEW = 16384, 8
_CHEAP = frozenset(
    f"{name}Backward"
    for name in (
        "Abs", "Add", "Clamp", "Clone", "Cos", "Div", "Exp", "Expand", "Gather", "Gelu", "Index", "IndexSelect", "Log",
        "MaskedFill", "Mul", "Neg", "Permute", "Pow", "Relu", "ReshapeAlias", "Rsqrt", "Select", "Sigmoid", "Silu",
        "Sin", "Slice", "Softmax", "Softplus", "Sqrt", "Squeeze", "Sub", "T", "Tanh", "ToCopy", "Transpose",
        "UnsafeView", "Unsqueeze", "View", "Where",
    )
)  # fmt: skip
"""Nodes of operations whose work is as large as what they return."""


def cheap_tail(function: Any, outputs: Any, number: int) -> bool:
    """Whether the operation of node `number`, and all after it, were little work.

    To run those again is faster than to leave them out by an exception, which passes through autograd. Found out once
    for a function, while that lives: torch 2.13 frees a graph one node inside the other where somebody has looked at
    each of its nodes, and the stack ends after some ten thousand.
    """
    if type(outputs) is not torch.Tensor or not outputs.requires_grad or outputs.numel() > _SMALL:
        return False
    left = node_count() - number
    if left > _FEW:
        return False
    owner, name = (function.__self__, function.__func__) if isinstance(function, MethodType) else (function, None)
    try:
        known = _tails.of(owner)
    except TypeError:  # nobody can tell when it is gone
        return _is_cheap(outputs.grad_fn, number, left)
    found = known.get((name, left))
    if found is None:
        found = known[name, left] = _is_cheap(outputs.grad_fn, number, left)
    return found


_tails: Notes[tuple[Any, int]] = Notes()


def _is_cheap(last: Any, number: int, left: int) -> bool:
    waiting = [] if last is None else [last]
    found = set()
    while waiting:
        node = waiting.pop()
        if node.name().rstrip("0123456789") not in _CHEAP:
            return False
        found.add(node._sequence_nr())
        if len(found) == left:
            return number in found
        for before, _ in node.next_functions:
            if before is not None and number <= before._sequence_nr() < A_LEAF:
                waiting.append(before)
    return False


region_codes: set[Any] = set()
"""Code of the functions that call a region's function."""

_MOST_LISTED = 40


def _line() -> int:
    """Names the expression that runs now by those that called it, up to the region's own call."""
    return line_of(sys._getframe(5), region_codes.__contains__)


def line_of(frame: FrameType | None, is_call: Callable[[CodeType], bool]) -> int:
    """The same for the expression that `frame` is at, up to one whose code `is_call`."""
    name = 0
    while frame is not None and not is_call(frame.f_code):
        code = frame.f_code
        _, positions = _positions.get(id(code)) or _note_positions(code)
        if positions:
            name = hash((name, id(code), positions[frame.f_lasti >> 1]))
        frame = frame.f_back
    return name


_positions: dict[int, tuple[CodeType, list[Any]]] = {}


def _note_positions(code: CodeType) -> tuple[CodeType, list[Any]]:
    """Where each instruction stands in the source. Its offset will not do: the interpreter moves it as it adapts.

    Nothing for code of ours, which takes other ways to the same operation in a recompute, nor for modes.
    """
    passed = is_ours(code.co_filename) or code.co_name == "__torch_dispatch__"
    noted = _positions[id(code)] = code, [] if passed else list(code.co_positions())
    return noted


def match_aligned(forward: Trace, needed: Sequence[int], recompute: Trace) -> tuple[Pairs, bool]:
    """Pair `needed` with the packs of a recompute under way, by aligned segments; the last one counts as far as it got.

    Also tells whether that gave each of them a partner.
    """
    begun, made = len(recompute.starts), len(recompute.packs)
    if (
        recompute.packs == forward.packs[:made]
        and recompute.starts == forward.starts[:begun]
        and recompute.points == forward.points[:begun]
        and (begun == len(forward.starts) or made <= forward.starts[begun])
    ):
        reached = needed[: bisect_left(needed, made)]
        return dict(zip(reached, reached, strict=True)), len(reached) == len(needed)
    segments = list(zip(forward.segments(), recompute.segments(), strict=False))
    (begin, end), (other, now) = segments[-1]
    segments[-1] = (begin, min(end, begin + now - other)), (other, now)
    pairs: Pairs = {}
    points = zip(forward.points, recompute.points, strict=False)
    for (ours, theirs), (point, again) in zip(segments, points, strict=True):
        here = needed[bisect_left(needed, ours[0]) : bisect_left(needed, ours[1])]
        if here and point == again and _aligned(forward, ours, recompute, theirs):
            pairs |= {n: n + theirs[0] - ours[0] for n in here}
    return pairs, len(pairs) == len(needed)


def match(
    forward: Trace, needed: Sequence[int], recompute: Trace, compare: bool, returned: bool = True
) -> tuple[Pairs, Pairs]:
    """Pair the packs that the forward's return left alive (`needed`) with those of a finished recompute.

    What cannot be told is left out. The second pairs are by order alone, so hold only if the nodes that saved them are
    of one kind. Without `compare`, metadata may differ. A forward that has not `returned` differentiates inside itself.
    """
    ours, theirs = forward.segments(), recompute.segments()
    head = tail = 0
    shorter = min(len(ours), len(theirs))
    while head < shorter and _aligned(forward, ours[head], recompute, theirs[head]):
        head += 1
    while tail < shorter - head and _aligned(forward, ours[-1 - tail], recompute, theirs[-1 - tail]):
        tail += 1
    pairs: Pairs = {}
    guesses: Pairs = {}
    matched = [*zip(ours[:head], theirs[:head], strict=True)]
    if tail:
        matched += zip(ours[-tail:], theirs[-tail:], strict=True)
    wanted = set(needed)
    for (begin, end), (other, _) in matched:
        pairs |= {n: other + n - begin for n in range(begin, end) if n in wanted}
    if len(ours) > head + tail:
        first, last = ours[head][0], ours[len(ours) - tail - 1][1]
        rest = [n for n in needed if first <= n < last]
        if rest and len(theirs) > head + tail:
            start, stop = theirs[head][0], theirs[len(theirs) - tail - 1][1]
            candidates = [n for n in recompute.live if start <= n < stop]
            more, guesses = _by_liveness(forward, rest, recompute, candidates, compare, returned)
            pairs |= more
    return pairs, guesses


def _aligned(forward: Trace, ours: tuple[int, int], recompute: Trace, theirs: tuple[int, int]) -> bool:
    some, others = forward.packs[slice(*ours)], recompute.packs[slice(*theirs)]
    return some == others or (len(some) == len(others) and _casts(some) and _ranked(some) == _ranked(others))


def _casts(packs: list[_Pack]) -> bool:
    """Whether autocast may have been on. Then one phase may find the cast of a weight that the other one makes."""
    return any(pack[1] in _LOWER for pack in packs)


def _ranked(packs: list[_Pack]) -> list[tuple[Any, ...]]:
    """Packs by the nodes that saved something, and no others, as casts do not."""
    ranks = {node: n for n, node in enumerate(dict.fromkeys(pack[3] for pack in packs))}
    return [(*pack[:3], ranks[pack[3]], pack[4]) for pack in packs]


def _by_liveness(
    forward: Trace, ours: list[int], recompute: Trace, theirs: list[int], compare: bool, returned: bool
) -> tuple[Pairs, Pairs]:
    """Pair the live packs of a stretch in which the phases ran different code."""
    pairs: Pairs = {}
    if forward.told_at >= 0 and recompute.told_at >= 0:
        # What the same line saved, called the same way, in both phases.
        lines = {forward.line(n) for n in ours} & {recompute.line(n) for n in theirs} - {None}
        common = [n for n in ours if forward.line(n) in lines]
        again = [n for n in theirs if recompute.line(n) in lines]
        if [_at_line(forward, n) for n in common] == [_at_line(recompute, n) for n in again]:
            pairs = dict(zip(common, again, strict=True))
            ours = [n for n in ours if n not in pairs]
            theirs = sorted({*theirs} - {*again})
    # What the two branches saved, each in lines of its own: one for one, or not at all.
    guesses = dict(zip(ours, theirs, strict=False))
    if not compare and len(ours) == len(theirs):
        return pairs | guesses, {}
    if (
        len(ours) == len(theirs)
        and all(_could_be(forward, f, recompute, r) for f, r in guesses.items())
        and _ranks(forward, ours) == _ranks(recompute, theirs)
    ):
        return pairs, guesses
    if returned:  # else more will come, which may leave those of the recompute over
        pairs |= _indices(forward, ours, recompute, theirs)
    return pairs, {}


def _could_be(forward: Trace, ours: int, recompute: Trace, theirs: int) -> bool:
    if not forward.saved(ours).alike(recompute.saved(theirs)):
        return False
    one, other = forward.makers.get(ours), recompute.makers.get(theirs)
    if one is None or other is None:  # outputs come without the node that made them
        return one is other
    if one[0] != other[0]:
        return False
    before = one[1] < forward.told_at or other[1] < recompute.told_at  # made where both phases were still one
    return not before or _same_node(forward, one[1], recompute, other[1])


def _same_node(forward: Trace, ours: int, recompute: Trace, theirs: int) -> bool:
    """Whether nodes of these numbers, counted from the begin of either phase, are one, or made by the same code."""
    if ours < 0 or theirs < 0:  # from before the region, as of an argument
        return ours + forward.begun == theirs + recompute.begun
    return ours == theirs or (_casts(forward.packs) and forward.rank(ours) == recompute.rank(theirs))


def _ranks(trace: Trace, packs: list[int]) -> list[int]:
    """In which order the packs were made. Work that one phase leaves out shifts the numbers, but not their order."""
    makers = [trace.makers[n][1] for n in packs if n in trace.makers]
    known = sorted(set(makers))
    return [known.index(number) for number in makers]


def _at_line(trace: Trace, pack: int) -> tuple[Any, ...]:
    return *trace.packs[pack][:3], trace.line(pack)


def _indices(forward: Trace, ours: list[int], recompute: Trace, theirs: list[int]) -> Pairs:
    """Index tensors of the two branches, where only one pairing fits: they hold the decision in either phase.

    `topk` saves its indices for the gradient of its values; a `gather` with the saved indices saves those.
    """
    ours = [n for n in ours if not _inexact(forward.saved(n).dtype)]
    ways: list[tuple[int, ...]] = [()]
    for n in ours:
        fits = [m for m in theirs if forward.saved(n).alike(recompute.saved(m))]
        ways = [(*way, m) for way in ways for m in fits if not way or m > way[-1]]
        if len(ways) > 64:
            return {}
    return dict(zip(ours, ways[0], strict=True)) if len(ways) == 1 else {}


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def node_names(outputs: list[Any], recompute: Trace, packs: Iterable[int]) -> dict[int, str]:
    """Names of the nodes that saved `packs`, by their number, found from the tensors that the recompute gave."""
    wanted = {recompute.number(n) for n in packs}
    waiting = deque(leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None)
    names: dict[int, str] = {}
    seen = set(waiting)
    while waiting and len(names) < len(wanted):
        node = waiting.popleft()
        number = node._sequence_nr()
        if number in wanted:
            names.setdefault(number, node.name())
        before = {following for following, _ in node.next_functions if following is not None} - seen
        before = {following for following in before if following._sequence_nr() >= recompute.begun}
        seen |= before
        waiting.extend(before)
    return names


def other_layout(forward: Trace, recompute: Trace) -> str | None:
    """A pack of the forward that the same line of a recompute made with other strides, where nothing is matched."""
    layouts: dict[int | None, list[tuple[int, ...] | None]] = {}
    for n in range(len(recompute.packs)):
        layouts.setdefault(recompute.line(n), []).append(recompute.layouts.get(n))
    for n in range(len(forward.packs)):
        again = layouts.get(forward.line(n))
        if again and again.pop(0) != forward.layouts.get(n):
            return forward.told_of(n)
    return None
