"""What else to keep: policies that are data, can be put together, and say so if they match nothing."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from roundpipe_core._errors import OptionError, message, shown

from ._jax import is_remat3
from ._names import OURS
from ._offload import Offload, Offloading, check_memory, offload_option
from ._programs import subprograms
from ._tags import names_in

__all__ = ["Either", "check_matches", "check_policy", "save_dots", "save_either", "save_policy", "with_tags"]

_POLICIES = jax.checkpoint_policies
_DOTS = (_POLICIES.dots_saveable, _POLICIES.dots_with_no_batch_dims_saveable)


def save_policy(*names: str, offload: str | Offload | None = None) -> Any:
    """A policy that keeps what layers save and what `keep` holds, and the values named `names`.

    For any `jax.checkpoint`:

    >>> import jax
    >>> from roundpipe_jax import save_for_recompute, save_policy
    >>> def layer(x):
    ...     order = jax.numpy.argsort(jax.lax.stop_gradient(x))
    ...     order, = save_for_recompute(order)
    ...     return jax.numpy.sin(x[order]).sum()
    >>> jax.grad(jax.checkpoint(layer, policy=save_policy()))(jax.numpy.arange(3.0)).shape
    (3,)

    What is saved is kept without it, too, but under JAX_REMAT3, where only the values that `save_for_recompute` returns
    are. Such a checkpoint runs the layer's Python code once, so that `doing_recompute()` is always False in it.

    Args:
        *names: further names, given by `jax.ad_checkpoint.checkpoint_name`.
        offload: "cpu" or an `Offload`, to keep what layers save in host memory.

    Returns:
        A policy for `jax.checkpoint`: that of `jax.checkpoint_policies.save_only_these_names` without `offload`.

    Raises:
        OptionError: `offload` is neither, or JAX_REMAT3 is set, which would ignore such a policy.
    """
    given: tuple[Any, ...] = names
    others = [name for name in given if not isinstance(name, str)]
    if others:
        what = f"save_policy takes names, not {shown(others[0])}."
        raise OptionError(message(what, [], 'give each as a string: save_policy("attention", "mlp").'))
    policy = _saves_only({*OURS, *names})
    plan = offload_option(offload, "save_policy")
    if plan is None:
        return policy
    if is_remat3():
        raise OptionError(
            message(
                "save_policy: a policy that offloads is ignored under JAX_REMAT3.",
                [("offload", repr(plan))],
                "leave offload out, or unset JAX_REMAT3.",
            )
        )
    check_memory("any, by save_policy")
    return Offloading(policy, plan)


def save_dots(*, batched: bool = True) -> Any:
    """A policy that keeps the results of matrix products and convolutions.

    >>> from roundpipe_jax import save_dots
    >>> save_dots(batched=False) is not None
    True

    Args:
        batched: False leaves out products with batch dimensions, such as attention scores.
    """
    return _DOTS[0] if batched else _DOTS[1]


def save_either(*policies: Any) -> Any:
    """A policy that keeps what any of `policies` keeps.

    >>> from roundpipe_jax import save_dots, save_either, save_policy
    >>> save_either(save_policy("a"), save_policy("b")) == save_policy("a", "b")
    True
    >>> both = save_either(save_policy("a"), save_dots())

    Args:
        *policies: from `save_policy`, `save_dots`, `jax.checkpoint_policies`, or functions like theirs.
    """
    for policy in policies:
        check_policy(policy, "save_either")
    names = [_names(policy) for policy in policies]
    if all(found is not None for found in names):
        return _saves_only({name for found in names for name in found or ()})
    return Either(tuple(policies))


@dataclass(frozen=True)
class Named:
    """Keeps the values of these names. Two of the same names are equal; JAX's own are functions since 0.12."""

    saveable_names: frozenset[str]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        return _POLICIES.save_only_these_names(*self.saveable_names)(primitive, *avals, **params)


def _saves_only(names: Collection[str]) -> Any:
    policy = _POLICIES.save_only_these_names(*sorted(names))
    return policy if hasattr(policy, "saveable_names") else Named(frozenset(names))


@dataclass(frozen=True)
class Either:
    """Keeps what any of its policies keeps."""

    policies: tuple[Any, ...]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        answers = [policy(primitive, *avals, **params) for policy in self.policies]
        return next((answer for answer in answers if answer is not False and not _recomputes(answer)), False)


def _recomputes(answer: Any) -> bool:
    return type(answer).__name__ == "RecomputeType"


def with_tags(policy: Any) -> Any:
    """`policy`, and what layers save."""
    if policy is None or policy is _POLICIES.nothing_saveable:
        return save_policy()
    if policy is _POLICIES.everything_saveable:
        return policy
    return save_either(save_policy(), policy)


def _names(policy: Any) -> frozenset[str] | None:
    names = _made_of(policy, "saveable_names", "names_which_can_be_saved")
    return frozenset(names) if names is not None else None


def _other_names(policy: Any) -> Any:
    """Those that it does not keep."""
    return _made_of(policy, "names", "names_not_to_save")


def _made_of(policy: Any, attribute: str, variable: str) -> Any:
    """What a policy of JAX has as an `attribute`, or, if it is a function, as a `variable`."""
    found = getattr(policy, attribute, None)
    if found is None and inspect.isfunction(policy):
        return inspect.getclosurevars(policy).nonlocals.get(variable)
    return found


def check_policy(given: Any, function: str) -> None:
    """An error if `function` was given something else for a policy."""
    if not callable(given):
        raise OptionError(
            message(
                f"{function}: {shown(given)} is no policy.",
                [],
                'give save_policy("name"), save_dots(), or one of jax.checkpoint_policies.',
            )
        )


def check_matches(policy: Any, program: ClosedJaxpr, layer: str) -> None:
    """An error for each part of `policy` that nothing in the layer matches."""
    if policy is None:
        return
    if isinstance(policy, Either):
        for part in policy.policies:
            check_matches(part, program, layer)
        return
    if is_remat3() and not _known_to_remat3(policy):
        raise OptionError(
            message(
                f"layer {layer!r}: this policy is ignored under JAX_REMAT3, which knows only names.",
                [("policy", repr(policy))],
                "use save_policy(...) with names, or unset JAX_REMAT3.",
            )
        )
    asked = _names(policy) or _other_names(policy)
    if asked is not None:
        present = names_in(program.jaxpr)
        missing = sorted(set(asked) - present - set(OURS))
        if missing:
            raise OptionError(
                message(
                    f"layer {layer!r}: the policy names {', '.join(map(repr, missing))}, and nothing in the layer is "
                    "called that.",
                    [("names in the layer", ", ".join(sorted(map(repr, present - set(OURS)))) or "none")],
                    "name the value by jax.ad_checkpoint.checkpoint_name(value, name), and use what that returns.",
                )
            )
    if policy in _DOTS and not any(_may_keep(policy, eqn) for eqn in _operations(program.jaxpr)):
        raise OptionError(
            message(
                f"layer {layer!r}: the policy keeps matrix products, and matches nothing in the layer.",
                [("policy", repr(policy))],
                "leave it out here, or give save_dots(batched=True) if all products have batch dimensions.",
            )
        )


def _known_to_remat3(policy: Any) -> bool:
    return (
        _names(policy) is not None
        or _other_names(policy) is not None
        or policy in (_POLICIES.everything_saveable, _POLICIES.nothing_saveable)
    )


def _may_keep(policy: Any, eqn: JaxprEqn) -> bool:
    if eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")):
        return True  # its derivative is not in the program yet
    return bool(policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params))


def _operations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subprograms(eqn):
            yield from _operations(inner)
