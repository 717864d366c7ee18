"""`remat`: a checkpointed layer that remembers its decisions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from roundpipe_core._errors import OptionError, message, shown

from . import _arguments
from ._calls import Call, Mode, Options, Verify, labelled
from ._identity import see_through
from ._jax import is_out_of_memory
from ._offload import Offload, offload_option
from ._policies import check_policy
from ._refusals import Refusals

__all__ = ["Mode", "Verify", "checkpoint", "remat"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def remat(
    fun: F,
    *,
    policy: Any = ...,
    prevent_cse: bool | Sequence[Any] | None = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    mode: Mode = ...,
    verify: Verify = ...,
    label: str | None = ...,
    offload: str | Offload | None = ...,
) -> F: ...
@overload
def remat(
    fun: None = None,
    *,
    policy: Any = ...,
    prevent_cse: bool | Sequence[Any] | None = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    mode: Mode = ...,
    verify: Verify = ...,
    label: str | None = ...,
    offload: str | Offload | None = ...,
) -> Callable[[F], F]: ...
def remat(
    fun: Any = None,
    *,
    policy: Any = None,
    prevent_cse: bool | Sequence[Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    mode: Mode = "checkpoint",
    verify: Verify = "off",
    label: str | None = None,
    offload: str | Offload | None = None,
) -> Any:
    """Recompute a layer in backward, with the decisions that its forward saved.

    >>> import jax, jax.numpy as jnp
    >>> from roundpipe_jax import remat, save_for_recompute
    >>> @remat
    ... def pick(x_TE):
    ...     idx_TK = jax.lax.top_k(jax.lax.stop_gradient(x_TE), 2)[1]
    ...     idx_TK, = save_for_recompute(idx_TK)
    ...     return jnp.take_along_axis(jax.nn.softmax(x_TE), idx_TK, axis=1).sum()
    >>> jax.grad(pick)(jnp.array([[1.0, 3.0, 2.0]])).shape
    (1, 3)

    A layer that saves nothing and never asks for its phase is exactly `jax.checkpoint(fun)`.

    Args:
        fun: the layer: a function, a bound method, a partial, a module. Arguments and results are pytrees;
            leaves that are not arrays (flags, strings, functions, None) stay as they are, in both phases.
        policy: what else to keep, as for `jax.checkpoint`: see `save_policy` and `save_dots`.
        prevent_cse: keep the compiler from merging recompute and forward. None: yes; `remat_layers` says
            no, since a scan does it already. A sequence gives it per argument.
        static_argnums: positional arguments that the layer takes as they are, though they hold arrays.
        static_argnames: the same for keyword arguments.
        mode: "checkpoint", or "custom_vjp", which keeps exactly the inputs and the slot and has no
            forward-mode derivative.
        verify: "warn" or "raise" decide everything a second time and compare, see `VerifyError`. For finding
            faults, not for training. For a layer inside another layer, the option of the outermost one counts.
        label: what messages and reports call the layer.
        offload: "cpu" keeps what the layer saves in host memory until backward, an `Offload` says more.

    Returns:
        A function like `fun`; without `fun`, a decorator.

    Raises:
        OptionError: an option is not one of the above, or `policy` matches nothing in the layer.
        MismatchError: the recompute does not produce what the forward did, or needs a value that was not saved.
        GradientError: the layer saved a value that depends on what is being differentiated.

    Implements R1, R2, R8, R9 and R10.
    """
    options = _checked(
        Options(
            policy,
            True if prevent_cse is None else prevent_cse,
            _arguments.numbers(static_argnums),
            _arguments.names(static_argnames),
            mode,
            verify,
            label,
            offload_option(offload, "remat"),
        )
    )
    if fun is None:
        return functools.partial(_wrapped, options=options)
    return _wrapped(fun, options)


checkpoint = remat


def _checked(options: Options) -> Options:
    for name, value, known in (
        ("mode", options.mode, ("checkpoint", "custom_vjp")),
        ("verify", options.verify, ("off", "warn", "raise")),
    ):
        if value not in known:
            raise OptionError(
                message(f"remat: {name}={value!r} does not exist.", [], f"choose one of {', '.join(map(repr, known))}.")
            )
    label: Any = options.label
    if label is not None and not isinstance(label, str):
        what = f"remat: label must be a string, not {shown(label)}."
        raise OptionError(message(what, [], 'name the layer, as in label="block 3".'))
    if options.policy is not None:
        check_policy(options.policy, "remat")
    return options


def _wrapped(fun: Any, options: Options) -> Any:
    if not callable(fun):
        raise OptionError(message(f"remat takes a function, not {shown(fun)}.", [], "pass the layer itself."))
    if isinstance(fun, type) and any("__call__" in vars(base) for base in fun.__mro__):
        raise OptionError(
            message(
                f"remat takes a function, and {fun.__name__} is a class: a call of it makes a layer, and runs none.",
                [],
                "pass an instance or a function; for a class of flax there is flax.linen.remat.",
            )
        )
    _arguments.check_names(fun, options.static_argnames)
    if options.mode == "custom_vjp" and options.policy is not None:
        raise Refusals.of(labelled(fun), options.label or labelled(fun)).policy(options.policy)

    def layer(*args: Any, **kwargs: Any) -> Any:
        return Call(fun, options, args, kwargs).result()

    try:
        functools.update_wrapper(layer, fun)
    except Exception as error:  # of a module whose attributes refuse to be copied
        if is_out_of_memory(error):
            raise
    see_through(layer)
    return layer
