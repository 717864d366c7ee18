"""JAX's programs run one operation at a time, and not compiled as a whole.

Compiling a random program takes up to a second, running it in steps takes milliseconds. All that JAX does before its
compiler is as ever: tracing, caches of traces, differentiation, batching, partial evaluation. Loops, branches, jitted
and checkpointed functions then run as their meaning says. Single operations are compiled once, so that two programs
that do the same operations give the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import pjit as jax_pjit
from jax._src.callback import pure_callback_p
from jax._src.lax.control_flow.conditionals import cond_p
from jax._src.lax.control_flow.loops import scan_p, while_p
from jax._src.pjit import jit_p
from jax.interpreters import partial_eval

from roundpipe_jax._jax import scan_sizes

__all__ = ["interpreted"]

_compiled = jax_pjit._pjit_call_impl_python
_run = jit_p.impl


def evaluated(closed: Any, *args: Any) -> list[Any]:
    """The results of a program, of whose operations only those run that are needed, as compiled."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jax.core.eval_jaxpr(jaxpr, closed.consts, *args)


def scanned(*args: Any, length: int, reverse: bool, jaxpr: Any, **sizes: Any) -> Any:
    num_consts, num_carry = scan_sizes(sizes)
    consts, carry = list(args[:num_consts]), list(args[num_consts : num_consts + num_carry])
    stacked = args[num_consts + num_carry :]
    rows: list[Any] = [None] * length
    for n in reversed(range(length)) if reverse else range(length):
        out = evaluated(jaxpr, *consts, *carry, *(array[n] for array in stacked))
        carry, rows[n] = out[:num_carry], out[num_carry:]
    return [*carry, *map(jnp.stack, zip(*rows, strict=True))]


def looped(*args: Any, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int, body_jaxpr: Any, **_: Any) -> Any:
    first = cond_nconsts + body_nconsts
    carry = list(args[first:])
    while True:
        (go,) = evaluated(cond_jaxpr, *args[:cond_nconsts], *carry)
        if not jnp.any(go):
            return carry
        after = evaluated(body_jaxpr, *args[cond_nconsts:first], *carry)
        rows = [
            jnp.reshape(go, (*go.shape, *(1,) * (array.ndim - go.ndim))) for array in after
        ]  # under vmap each its own
        carry = [jnp.where(row, new, old) for row, new, old in zip(rows, after, carry, strict=True)]


def branched(index: Any, *args: Any, branches: Any, **_: Any) -> Any:
    return evaluated(branches[int(jnp.clip(index, 0, len(branches) - 1))], *args)


def called(*args: Any, jaxpr: Any, **options: Any) -> Any:
    return _run(*args, jaxpr=jaxpr, **options) if is_single(jaxpr) else evaluated(jaxpr, *args)


def called_back(*args: Any, callback: Any, **_: Any) -> Any:
    return [jnp.array(result) for result in callback(*args)]


def dispatched(*args: Any, jaxpr: Any, **options: Any) -> Any:
    """What `jax.jit` does without traces around."""
    if is_single(jaxpr):
        return _compiled(*args, jaxpr=jaxpr, **options)
    return evaluated(jaxpr, *args), None, None, []


def is_single(jaxpr: Any) -> bool:
    """Whether it is one operation, or none."""
    return len(jaxpr.eqns) <= 1 and not any(eqn.primitive in _RULES for eqn in jaxpr.eqns)


_RULES = {scan_p: scanned, while_p: looped, cond_p: branched, jit_p: called, pure_callback_p: called_back}


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """In this block nothing but single operations is compiled. Functions compiled before stay so."""
    before = {primitive: primitive.impl for primitive in _RULES}
    for primitive, rule in _RULES.items():
        primitive.impl = rule
    jax_pjit._pjit_call_impl_python = dispatched
    try:
        yield
    finally:
        jax_pjit._pjit_call_impl_python = _compiled
        for primitive, rule in before.items():
            primitive.impl = rule
