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


def refuse_blank(whole: HostArray, lead: tuple[int, ...], real: Sequence[int], experts: int) -> None:
    """Refuse expert 0 for all choices of all layers of one of the `real` tokens, or of all tokens in one layer.

    Of one choice a token nothing can be said: expert 0 is then an expert like another. Nor where routing that was
    drawn at random, as in a test, would have such zeros with more than `_CHANCE`.
    """
    count_L, *tail = whole.shape[len(lead) :]
    count_K, count_T = math.prod(tail), len(real)
    data, width = bytes(whole.data), count_K * itemsize_of(whole.dtype)
    if count_K < 2 or bytes(width) not in data:
        return
    each = count_L * width
    for n in real if _is_no_chance(count_T, count_L * count_K, experts) else ():
        if not data[n * each : (n + 1) * each].strip(b"\0"):
            raise wrong(
                f"nothing but expert 0 at {_spot(n, lead)}, in every layer: zeros where the engine has no record",
                "a router chooses different experts. Mark the tokens that were routed by mask=, and say by padding= "
                "what the others get.",
            )
    for layer in range(count_L if count_L > 1 and _is_no_chance(count_L, count_T * count_K, experts) else 0):
        begin = layer * width
        if not any(data[n * each + begin : n * each + begin + width].strip(b"\0") for n in real):
            raise wrong(f"nothing but expert 0 in layer {layer}, for every token", _LEAVE_OUT)


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
    raise wrong(f"expert {value} of {experts} at {spot}", "give the number of experts of the model.")


def _minus_one_in(dtype: str) -> int | None:
    """What -1 becomes in an unsigned type."""
    return 2 ** (8 * itemsize_of(dtype)) - 1 if dtype.startswith("uint") else None


def _spot(n: int, lead: tuple[int, ...]) -> str:
    return f"token {n}" if len(lead) == 1 else f"row {n // lead[1]}, token {n % lead[1]}"
