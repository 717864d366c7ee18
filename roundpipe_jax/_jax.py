"""The few parts of JAX that are untyped, or known by another name in another version, in one place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.ad_checkpoint
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax._src.state import discharge  # what makes values of references has no public name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

__all__ = [
    "behind",
    "belongs_to",
    "cannot_name",
    "concrete_value",
    "current_trace",
    "default_platform",
    "fresh_var",
    "is_about_effects",
    "is_about_forward_mode",
    "is_callback",
    "is_custom_vjp",
    "is_differentiated",
    "is_float",
    "is_io",
    "is_mapped",
    "is_numpy",
    "is_on_host",
    "is_ordered",
    "is_out_of_memory",
    "is_plain",
    "is_reference",
    "is_remat3",
    "is_running",
    "is_tracer",
    "is_write",
    "jax_checkpoint",
    "let_go",
    "memory_kinds",
    "move_to_device",
    "move_to_host",
    "named",
    "of_values",
    "open_traces",
    "optimization_barrier",
    "replaced",
    "reverse_only",
    "scan_sizes",
    "struct",
    "trace_of",
    "trace_state",
    "user_context",
    "zeros",
]

_T = TypeVar("_T")
_untyped: Any = jax

jax_checkpoint = jax.checkpoint
"""JAX's own, also where somebody has put `remat` in its place for code that cannot be edited."""


def user_context() -> Any:
    """A setting that is part of the key of JAX's caches of traces."""
    return _untyped.make_user_context(None)


def trace_state() -> Any:
    """The trace that operations of this thread go to now. Compare two by `==`."""
    state: Any = jax.extend.core.get_opaque_trace_state
    return state()


def current_trace() -> Any:
    """The same as what JAX knows it by."""
    return trace_state()._trace_ref()


def open_traces() -> list[Any]:
    """The traces that operations of this thread go through now, innermost first."""
    found: list[Any] = []
    trace = current_trace()
    while trace is not None:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def let_go(trace: Any) -> None:
    """Take what it holds from a trace that ends with an exception: JAX would hold both for good."""
    if type(trace).__name__ == "DynamicJaxprTrace":
        trace.invalidate()


def belongs_to(inner: Any, outer: Any) -> bool:
    """Whether values without tangents of one trace are good in the other: nothing but differentiation is between."""
    trace, home = inner._trace_ref(), outer._trace_ref()
    while trace is not home and type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
        trace = trace.parent_trace
    return trace is home and trace is not None


def cannot_name() -> bool:
    """Whether naming a value would fail: the coming `jax.checkpoint` has no rule for names under `jax.vmap`."""
    state: Any = jax.extend.core
    return is_remat3() and bool(state.unsafe_am_i_under_a_vmap_DO_NOT_USE())


def is_running() -> bool:
    """Whether operations run now, maybe batched or differentiated, and are not traced for later."""
    state: Any = jax.extend.core
    return not state.unsafe_am_i_under_a_jit_DO_NOT_USE()


def is_tracer(value: Any) -> bool:
    """Whether `value` is an array under a transformation, and not an array in memory."""
    return isinstance(value, jax.core.Tracer)


def concrete_value(tracer: Any) -> Any:
    """The array that a tracer stands for, or None if it stands for no particular one."""
    return tracer.to_concrete_value()


def behind(tracer: Any) -> Any:
    """The array that a tracer computes with, batched as it is; a tracer still if nothing is computed yet."""
    while is_tracer(tracer):
        inner = getattr(tracer, "val", getattr(tracer, "primal", None))  # of vmap; of jvp and linearize
        if inner is None:
            return tracer
        tracer = inner
    return tracer


def is_mapped(value: Any) -> bool:
    """Whether `value` varies over the examples of the `jax.vmap` that operations go to now."""
    return is_tracer(value) and value._trace is current_trace()


def is_differentiated(value: Any) -> bool:
    """Whether the innermost transformation of `value` is a differentiation, or there is none."""
    return not is_tracer(value) or hasattr(value, "primal")


def default_platform() -> str:
    """Where new arrays go: ``cpu``, ``gpu``."""
    chosen: Any = _untyped.config.jax_default_device
    if chosen is None:
        return jax.default_backend()
    return chosen if isinstance(chosen, str) else str(chosen.platform)


def is_numpy(value: Any) -> bool:
    """Whether `value` is an array of numpy, or JAX's wrapper around one in a program."""
    return isinstance(value, (np.ndarray, np.generic)) or type(value).__name__ == "TypedNdArray"


def is_float(value: Any) -> bool:
    """Whether derivatives exist for `value`."""
    return not is_reference(value) and bool(jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact))


def is_callback(effect: Any) -> bool:
    """Whether an effect is that of a callback."""
    return type(effect).__name__ in ("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect")


def is_ordered(effect: Any) -> bool:
    """Whether an effect is that of a callback that keeps its place among others."""
    return type(effect).__name__ in ("OrderedDebugEffect", "OrderedIOEffect")


def is_io(effect: Any) -> bool:
    """Whether an effect is that of `io_callback`."""
    return type(effect).__name__ in ("IOEffect", "OrderedIOEffect")


def is_remat3() -> bool:
    """Whether `jax.checkpoint` is the coming implementation, which `JAX_REMAT3=1` turns on."""
    return bool(getattr(jax.config, "jax_remat3", False))


def memory_kinds() -> set[str]:
    """The kinds of memory that the default device reaches."""
    [device, *_] = jax.local_devices(backend=default_platform())
    return {str(memory.kind) for memory in device.addressable_memories()}


def is_plain(aval: Any) -> bool:
    """Whether values of this type are arrays, and not references or tokens."""
    return type(aval).__name__ == "ShapedArray"


def is_on_host(aval: Any) -> bool:
    """Whether arrays of this type are in memory of the host."""
    return bool(getattr(aval, "memory_space", None) == jax.memory.Space.Host)


def move_to_host(array: _T) -> _T:
    """`array` in pinned memory of the host."""
    space = jax.memory.Space
    moved: _T = _untyped.device_put(array, space.Host, src=space.Device)
    return moved


def move_to_device(array: _T) -> _T:
    """`array` in the memory of the device, from that of the host."""
    space = jax.memory.Space
    moved: _T = _untyped.device_put(array, space.Device, src=space.Host)
    return moved


def named(value: Any, name: str) -> Any:
    """`value`, called `name` in the program."""
    name_it: Any = jax.ad_checkpoint.checkpoint_name
    return name_it(value, name)


def optimization_barrier(values: _T) -> _T:
    """`values`, behind a point that the compiler moves nothing across.

    Under `jax.shard_map` one barrier would make them all vary over the mesh, so each kind gets its own.
    """
    leaves, tree = jax.tree.flatten(values)
    structure: Any = tree
    kinds: dict[Any, list[int]] = {}
    for n, leaf in enumerate(leaves):
        kind: Any = jax.typeof(leaf)
        kinds.setdefault((getattr(kind, "mat", None), getattr(kind, "vma", None)), []).append(n)
    for numbers in kinds.values():
        barred = _untyped.lax.optimization_barrier([leaves[n] for n in numbers])
        for n, leaf in zip(numbers, barred, strict=True):
            leaves[n] = leaf
    result: _T = structure.unflatten(leaves)
    return result


def struct(shape: Any, dtype: Any) -> Any:
    """An array's shape and dtype."""
    return _untyped.ShapeDtypeStruct(shape, dtype)


def trace_of(function: Callable[..., Any], variables: list[Any]) -> Jaxpr:
    """The program of a function of values like those of some variables, for a place beside theirs in a program."""
    avals: list[Any] = [var.aval for var in variables]
    mesh = avals[0].sharding.mesh
    kinds = [
        _untyped.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=None if mesh.empty else aval.sharding, manual_axis_type=aval.mat
        )
        for aval in avals
    ]
    with _untyped.sharding.use_abstract_mesh(mesh):
        traced: Jaxpr = jax.make_jaxpr(function)(*kinds).jaxpr
    return traced


def replaced(part: _T, **parts: Any) -> _T:
    """A program with other operations, or an operation with other operands, results or parameters."""
    untyped: Any = part
    new: _T = untyped.replace(**parts)
    return new


def fresh_var(like: Var) -> Var:
    """A new variable of a program."""
    return Var(like.aval)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def reverse_only(refusal: Callable[[], Exception], value: Any) -> Any:
    """`value`, whose derivative raises `refusal()` where it is computed forward. Reverse mode only transposes it.

    Derivatives of the derivative are not concerned.
    """
    return value


@reverse_only.defjvp
def _reverse_only_rule(refusal: Any, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return primals[0], _tangent.bind(*tangents, refusal=refusal)


def _refuse(*_: Any, refusal: Callable[[], Exception], **__: Any) -> Any:
    raise refusal()


_tangent: Any = Primitive("reverse_only")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda value, **_: value)
_rules: Any = (ad, batching, mlir)
_rules[0].deflinear2(_tangent, lambda dot, *_, **__: [dot])
_rules[1].primitive_batchers[_tangent] = lambda values, dims, **params: (_tangent.bind(*values, **params), dims[0])
_rules[2].register_lowering(_tangent, _refuse)


def is_reference(value: Any) -> bool:
    """Whether `value` is a `jax.Ref`, under a transformation too."""
    return isinstance(value, jax.Ref)


def is_write(effect: Any) -> bool:
    """Whether it is that of an operation that writes to a `jax.Ref`."""
    return type(effect).__name__ in ("WriteEffect", "AccumEffect")


def of_values(jaxpr: Jaxpr) -> Jaxpr:
    """The program with the values of references in place of those among its constants. What it writes is dropped."""
    count, results = len(jaxpr.constvars), len(jaxpr.outvars)
    state: Any = discharge
    info: Any = jaxpr.debug_info
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    whole = replaced(jaxpr, constvars=[], invars=inputs, debug_info=info.with_unknown_names())
    pure: Jaxpr = state.discharge_state(ClosedJaxpr(whole, [])).jaxpr
    invars, outvars = pure.invars[count:], pure.outvars[:results]
    return replaced(pure, constvars=pure.invars[:count], invars=invars, outvars=outvars, debug_info=info)


def zeros(var: Var) -> Any:
    """The tangent of a variable that does not vary."""
    return _rules[0].Zero(var.aval).instantiate()


def is_about_forward_mode(error: Exception) -> bool:
    """Whether JAX says that a function with a `custom_vjp` rule has no other rule."""
    if isinstance(error, NotImplementedError):  # under JAX_CUSTOM_VJP3
        return not str(error) or "CustomVJP" in str(error)
    return "forward-mode" in str(error)


def is_custom_vjp(eqn: JaxprEqn) -> bool:
    """Whether an operation is a call of a function with a `custom_vjp` rule."""
    held: Any = eqn.params.get("_prim")  # under JAX_CUSTOM_VJP3
    return eqn.primitive.name.startswith("custom_vjp_call") or type(held).__name__.startswith("CustomVJP")


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the device or of the host."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def is_about_effects(error: Exception) -> bool:
    """Whether JAX says that `jax.checkpoint` does not take a layer's effects."""
    return str(error).startswith("Effects not supported")


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # pragma: no cover - since jax 0.11
    return len(consts), len(carry)  # pragma: no cover - since jax 0.11
