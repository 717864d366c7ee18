"""Containers are taken apart and built again, with their types and without their old leaves."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref

import pytest

from roundpipe_core._trees import flatten, paths, unflatten

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Plan:
    order: object
    counts: list
    note: str = "plan"


@dataclasses.dataclass
class Handle:
    __slots__ = ("buffer", "size")
    buffer: object
    size: int


class Rows(list):
    pass


class Named(dict):
    pass


class Locked(dict):
    """As of a package of immutable containers."""

    def __setitem__(self, key, value):
        raise TypeError("locked")


class Span(tuple):
    def __new__(cls, first, last):
        return super().__new__(cls, (first, last))


class Thing:
    pass


VALUES = [
    (),
    (1, "a", None, 2.5, True, b"x", 3j),
    [1, [2, (3,)]],
    {"b": 1, "a": [2], 3: (4,)},
    Pair([1], {"x": 2}),
    collections.OrderedDict(z=1, y=2),
    collections.defaultdict(list, a=[1]),
    collections.deque([1, 2], maxlen=5),
    {1, 2, 3},
    frozenset({"a"}),
    Plan((1, 2), [3]),
    Handle([1], 2),
    Rows([1, 2]),
    Locked(a=1, b=[2]),
    Span(1, [2]),
    Span(1, 2)[:1],
    Named(a=1),
    [[], {}, ()],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_is_built_is_equal_and_of_the_same_types(value) -> None:
    leaves: list = []
    spec = flatten(value, leaves)
    built = unflatten(spec, iter(leaves))
    assert type(built) is type(value)
    assert built == value
    assert len(list(paths(spec))) == len(leaves)


def test_attributes_of_containers_are_kept() -> None:
    for value in (Locked(a=1), Span(1, 2), Rows([1]), Named(a=1)):
        value.unit = "tokens"
        leaves: list = []
        built = unflatten(flatten(value, leaves), iter(leaves))
        assert (built, built.unit) == (value, "tokens")


def test_details_that_equality_does_not_see() -> None:
    leaves: list = []
    value = (collections.deque([1], maxlen=5), collections.defaultdict(list), {"b": 1, "a": 2})
    deque, default, plain = unflatten(flatten(value, leaves), iter(leaves))
    assert deque.maxlen == 5
    assert default["new"] == []
    assert list(plain) == ["b", "a"]


BUILDERS = {"list": list, "rows": Rows, "deque": collections.deque, "plan": lambda x: Plan(1, x)}


@pytest.mark.parametrize("build", [*BUILDERS.values(), lambda x: Named(a=x[0])], ids=[*BUILDERS, "named"])
def test_new_containers_are_independent(build) -> None:
    value = build([[1], [2]])
    leaves: list = []
    spec = flatten(value, leaves)
    one, other = unflatten(spec, iter(leaves)), unflatten(spec, iter(leaves))
    inner = one.counts if isinstance(one, Plan) else one["a"] if isinstance(one, Named) else one
    inner.append(9)
    assert other == build([[1], [2]])


@pytest.mark.parametrize("build", [Named, Rows, Plan, Handle, collections.OrderedDict, Pair])
def test_a_spec_keeps_no_leaf_alive(build) -> None:
    thing = Thing()
    value = build(a=thing) if issubclass(build, dict) else Rows([thing]) if build is Rows else build(thing, [1])
    spec = flatten(value, [])
    gone = weakref.ref(thing)
    del thing, value
    gc.collect()
    assert gone() is None
    assert spec is not None


def test_paths_are_index_expressions() -> None:
    leaves: list = []
    spec = flatten(({"idx": 1, 2: [3]}, Plan(4, [5]), Pair(6, 7)), leaves)
    plan = ["[1].order", "[1].counts[0]", "[1].note"]
    assert list(paths(spec)) == ["[0]['idx']", "[0][2][0]", *plan, "[2][0]", "[2][1]"]


def test_unknown_objects_are_leaves_unless_a_frontend_opens_them() -> None:
    thing = Thing()
    thing.inside = [1]
    leaves: list = []
    flatten(thing, leaves)
    assert leaves == [thing]
    leaves = []
    flatten(thing, leaves, lambda value: (value.inside, list) if isinstance(value, Thing) else None)
    assert leaves == [1]
