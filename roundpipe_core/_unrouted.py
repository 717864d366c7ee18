"""Routing that no router can have chosen: places for which an engine had no record (R13).

T tokens, L layers, K chosen experts a token and layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._errors import TapeError, message
from ._host import HostArray, integers_of, itemsize_of
from ._tape import integer_extremes

__all__ = ["refuse_blank", "refuse_outside", "wrong"]

_CHANCE = 1e-4
_LEAVE_OUT = "leave out layers that have no experts, as in routing[:, 1:]; of others, ask the engine for their routing."


def wrong(what: str, way_out: str) -> TapeError:
    """Routing that is not to be used."""
    return TapeError(message(f"the routing has {what}.", [], way_out))


def refuse_blank(whole: HostArray, lead: tuple[int, ...], real: Sequence[int], experts: int, dtype: str) -> None:
    """Refuse one expert for all choices of all layers of one of the `real` tokens, or of all tokens in one layer.

    That is expert 0, as in a buffer that nobody filled, and the expert that -1 is in `dtype`, that of the routing as it
    was given. Of one choice a token nothing can be said: it is then an expert like another. Nor where routing that was
    drawn at random, as in a test, would have the same with more than `_CHANCE`.
    """
    _refuse_nothing_but(whole, lead, real, experts, 0, "zeros")
    last = _minus_one_in(dtype)
    if last is not None and last < experts:
        _refuse_nothing_but(whole, lead, real, experts, last, f"-1 in {dtype}")
        _refuse_unfilled(whole, lead, real, experts, last, dtype)


def _refuse_nothing_but(
    whole: HostArray, lead: tuple[int, ...], real: Sequence[int], experts: int, expert: int, sign: str
) -> None:
    count_L, *tail = whole.shape[len(lead) :]
    count_K, count_T = math.prod(tail), len(real)
    data, blank = bytes(whole.data), expert.to_bytes(itemsize_of(whole.dtype), "little") * count_K
    if count_K < 2 or blank not in data:
        return
    width, empty = len(blank), blank * count_L
    each = len(empty)
    for n in real if _is_no_chance(count_T, count_L * count_K, experts) else ():
        if data[n * each : (n + 1) * each] == empty:
            raise wrong(
                f"nothing but expert {expert} at {_spot(n, lead)}, in every layer: {sign} where the engine has no "
                "record",
                "a router chooses different experts. Mark the tokens that were routed by mask=, and say by padding= "
                "what the others get.",
            )
    for layer in range(count_L if count_L > 1 and _is_no_chance(count_L, count_T * count_K, experts) else 0):
        begin = layer * width
        if all(data[n * each + begin : n * each + begin + width] == blank for n in real):
            raise wrong(f"nothing but expert {expert} in layer {layer}, for every token", _LEAVE_OUT)


def _refuse_unfilled(
    whole: HostArray, lead: tuple[int, ...], real: Sequence[int], experts: int, expert: int, dtype: str
) -> None:
    """Refuse a choice that no token made in any layer: the engine's buffer had more room than its router needs."""
    count_L, *tail = whole.shape[len(lead) :]
    count_K = math.prod(tail)
    values, each = integers_of(whole), count_L * count_K
    if not _is_no_chance(count_K, len(real) * count_L, experts):
        return
    for k in range(count_K if count_K > 1 else 0):
        if all(values[n * each + at] == expert for n in real for at in range(k, each, count_K)):
            raise wrong(
                f"nothing but expert {expert} as choice {k} of every token, in every layer: -1 in {dtype}",
                "a router chooses different experts: leave out the choices that it does not make, as in "
                "routing[..., :6], or take the routing in a wider type where it is made, such as int16.",
            )


def _is_no_chance(tries: int, choices: int, experts: int) -> bool:
    """Whether, in so many tries, so many choices at random are hardly once all the same expert."""
    return math.log(tries or 1) - choices * math.log(experts) < math.log(_CHANCE)


def refuse_outside(whole: HostArray, lead: tuple[int, ...], experts: int, dtype: str, real: int) -> None:
    """Refuse what is no expert. `dtype` is that of the routing as it was given, which had `real` tokens."""
    extremes = integer_extremes(whole)
    if not extremes or 0 <= extremes[0] <= extremes[1] < experts:
        return
    values = integers_of(whole)
    each = math.prod(whole.shape[len(lead) :])
    count_K = math.prod(whole.shape[len(lead) + 1 :])
    at, value = next((n, v) for n, v in enumerate(values) if not 0 <= v < experts)
    layer = at % each // count_K
    spot = f"{_spot(at // each, lead)}, layer {layer}"
    if value == -1 and values[at % each :: each].tolist().count(-1) == real > 1 and max(extremes) >= 0:
        raise wrong(f"-1 in layer {layer}, for every token: not routed", _LEAVE_OUT)
    if value == -1 or value == _minus_one_in(dtype):
        wrapped = "" if value == -1 else f"{value}, which is -1 in {dtype}, "
        raise wrong(
            f"{wrapped or '-1 '}at {spot}: not routed, and as an index it would be the last expert",
            "mark the tokens that are real by mask=, and say by padding= what the others get; "
            "of a token that is real, ask the engine for its routing.",
        )
    if value < 0:
        raise wrong(
            f"{value} at {spot}: a number too large for {dtype}, which made a negative one of it",
            "take the routing in a wider type where it is made, such as int16.",
        )
    raise wrong(
        f"expert {value} of {experts} at {spot}",
        "give the number of experts of the model, if it has more; where an engine counts shared experts among them, or "
        "the copies that it keeps of some, give the numbers that the model's router has.",
    )


def _minus_one_in(dtype: str) -> int | None:
    """What -1 becomes in an unsigned type."""
    return 2 ** (8 * itemsize_of(dtype)) - 1 if dtype.startswith("uint") else None


def _spot(n: int, lead: tuple[int, ...]) -> str:
    return f"token {n}" if len(lead) == 1 else f"row {n // lead[1]}, token {n % lead[1]}"
