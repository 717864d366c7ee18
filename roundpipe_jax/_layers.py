"""A stack of equal layers: scan over their parameters, each layer a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from roundpipe_core._errors import OptionError, message, shown
from roundpipe_core._places import place_outside, where
from roundpipe_core._slots import label_of

from ._calls import labelled
from ._explain import repeated
from ._jax import jax_checkpoint
from ._offload import Offload
from ._packing import Held, is_array, split
from ._policies import save_policy
from ._remat import Mode, Verify, remat
from ._stacks import stack_of
from ._staging import stage
from ._updates import unfit_updates, unfit_updates_in

__all__ = ["remat_layers"]

_NUMBERS = (bool, int, float, complex)


def remat_layers(
    layer: Callable[..., Any],
    stacked_params: Any,
    x: Any,
    *broadcast: Any,
    nested: int | None = None,
    unroll: int = 1,
    has_aux: bool = False,
    policy: Any = None,
    mode: Mode = "checkpoint",
    verify: Verify = "off",
    label: str | None = None,
    offload: str | Offload | None = None,
) -> Any:
    """Run `x` through a stack of layers, each recomputed in backward with the decisions of its forward.

    >>> import jax, jax.numpy as jnp
    >>> from roundpipe_jax import remat_layers, save_for_recompute
    >>> def layer(w_DD, x_D):
    ...     best, = save_for_recompute(jnp.argmax(jax.lax.stop_gradient(x_D)))
    ...     return jnp.tanh(w_DD @ x_D) * x_D[best]
    >>> w_LDD = jnp.ones((4, 3, 3)) / 3  # 4 layers
    >>> jax.grad(lambda w: remat_layers(layer, w, jnp.ones(3)).sum())(w_LDD).shape
    (4, 3, 3)

    Each layer's slot is kept per layer, stacked by the scan.

    Args:
        layer: called as `layer(params, x, *broadcast)`; returns an `x` of the same structure and shapes.
        stacked_params: the parameters of all layers, a pytree of arrays whose first axis is the layer.
        x: what goes through the layers.
        *broadcast: what every layer gets alike, such as a mask.
        nested: number of groups of layers. Only the input of each group is kept, and its layers' inputs are made again
            in backward, group by group: about the square root of the number of layers is the least memory. The layers'
            decisions are made once all the same.
        unroll: how many layers the compiler sees at once, as for `jax.lax.scan`.
        has_aux: the layer returns `(x, aux)`, and so does this, with each layer's `aux` stacked.
        policy: as for `remat`.
        mode: as for `remat`. With `nested`, the groups are the regions, and "checkpoint" is the mode of theirs.
        verify: as for `remat`.
        label: as for `remat`.
        offload: as for `remat`; with `nested`, without inputs.

    Returns:
        The last layer's `x`, or `(x, aux)`.

    Raises:
        OptionError: the parameters are not stacked alike, or do not divide into `nested` groups, or a layer returns
            something else than goes into the next one.

    Implements R8 and R9 over a stack.
    """
    name = label or label_of(layer)
    count = _layers_in(stacked_params, name)
    _check_groups(nested, count, name)
    _check_arrays(x, name)
    one = remat(layer, policy=policy, prevent_cse=False, mode=mode, verify=verify, label=label, offload=offload)

    taped = stack_of(label or labelled(layer), count)

    def step(x: Any, inputs: Any) -> tuple[Any, Any]:
        params, taken = inputs
        result, kept = taped.layer(lambda: one(params, x, *broadcast), taken)
        passed, aux = _parted(result, x, has_aux, name)
        return passed, (aux, kept)

    def stack(inputs: Any, x: Any, length: int) -> tuple[Any, Any]:
        with repeated(length):
            return jax.lax.scan(step, x, inputs, unroll=unroll)

    inputs = (stacked_params, list(taped.arrays))
    if nested is None:
        last, (aux, kept) = stack(inputs, x, count)
    else:
        size = count // nested
        groups = jax.tree.map(lambda leaf: leaf.reshape(nested, size, *leaf.shape[1:]), inputs)

        def group(x: Any, inputs: Any) -> Any:
            return stack(inputs, x, size)

        # On a tape the layers are regions, and the groups are none.
        grouped: Callable[[Any, Any], Any] = remat(
            group, prevent_cse=False, verify=verify, label=f"{name}, {size} layers", offload=offload
        )
        if taped.taped:
            grouped = _checkpointed(group, name, where(place_outside()))
        with repeated(nested):
            last, out = jax.lax.scan(grouped, x, groups)
        aux, kept = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), out)
    taped.finish(kept)
    return (last, aux) if has_aux else last


def _parted(result: Any, x: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    """The `x` that a layer returned, which must be as the one that it got, and its `aux`."""
    pair = isinstance(result, (tuple, list)) and len(result) == 2
    if has_aux and not pair:
        raise _unlike(name, [("returned", _kind(result))], "return (x, aux), or leave out has_aux.")
    passed, aux = result if has_aux else (result, None)
    trees: list[Any] = [jax.tree.structure(passed), jax.tree.structure(x)]
    if trees[0] != trees[1]:
        beside = "for something besides x return (x, aux), and say has_aux=True."
        way = (
            beside
            if pair and not has_aux and not isinstance(x, (tuple, list))
            else "return an x of the same structure."
        )
        raise _unlike(name, [("got", _kind(x)), ("returned", _kind(passed))], way)
    for (path, one), two in zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(passed), strict=True):
        before, now = jax.typeof(one), jax.typeof(two)
        if before.shape != now.shape or (before.dtype != now.dtype and not before.weak_type):
            part = f"x{jax.tree_util.keystr(path)}"
            way = "return an x of the same shape."
            if before.shape == now.shape:
                way = "cast it in the layer to the dtype that it got, or before the first layer."
            raise _unlike(name, [("got", f"{part} of {_kind(one)}"), ("returned", f"{part} of {_kind(two)}")], way)
    return passed, aux


def _unlike(name: str, facts: list[tuple[str, str]], way_out: str) -> OptionError:
    what = f"layer {name!r}: what a layer of remat_layers returns goes into the next one, and is not like what it got."
    return OptionError(message(what, facts, way_out))


def _kind(value: Any) -> str:
    """What a value is, in words."""
    if is_array(value):
        kind = jax.typeof(value)
        return f"{kind.dtype}{list(kind.shape)}"
    count = len(jax.tree.leaves(value))
    return f"a {type(value).__name__} of {count} arrays" if count > 1 else shown(value)


def _checkpointed(group: Callable[[Any, Any], Any], name: str, called: str) -> Callable[[Any, Any], Any]:
    """`group`, recomputed with the decisions of its layers."""

    def grouped(x: Any, inputs: Any) -> Any:
        arrays, given = split((x, inputs))

        def flat(*arrays: Any) -> tuple[list[Any], Held]:
            results, shape = split(group(*given.join(arrays)))
            return results, Held(shape)

        program = stage(flat, arrays)
        if unfit_updates_in(program.jaxpr.jaxpr):
            raise unfit_updates(name, [("called at", called)])
        run = jax_checkpoint(program.bare().run, prevent_cse=False, policy=save_policy())
        return program.out[1].value.join(run(program.consts, arrays))

    return grouped


def _layers_in(stacked_params: Any, name: str) -> int:
    shapes = {
        jax.tree_util.keystr(path): getattr(leaf, "shape", () if isinstance(leaf, _NUMBERS) else None)
        for path, leaf in jax.tree_util.tree_leaves_with_path(stacked_params)
    }
    counts = {shape[0] if shape else None for shape in shapes.values()}
    if len(counts) == 1 and None not in counts:
        [count] = counts
        return int(count)  # type: ignore[arg-type]
    raise OptionError(
        message(
            f"layer {name!r}: remat_layers needs parameters stacked along their first axis, one entry a layer.",
            [
                (path or "the parameters", f"shape {shape}" if shape is not None else "no array")
                for path, shape in list(shapes.items())[:8]
            ],
            "stack them: jax.tree.map(lambda *leaves: jnp.stack(leaves), *params_of_each_layer).",
        )
    )


def _check_arrays(x: Any, name: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not is_array(leaf) and not isinstance(leaf, _NUMBERS):
            raise OptionError(
                message(
                    f"layer {name!r}: what goes through the layers of remat_layers is arrays.",
                    [(f"x{jax.tree_util.keystr(path)}", shown(leaf))],
                    "hand it to every layer alike, after x: remat_layers(layer, stacked_params, x, that).",
                )
            )


def _check_groups(nested: int | None, count: int, name: str) -> None:
    if nested is None or (type(nested) is int and nested >= 1 and count % nested == 0):
        return
    fitting = [n for n in range(1, count + 1) if count % n == 0]
    raise OptionError(
        message(
            f"layer {name!r}: {count} layers do not divide into nested={nested!r} groups.",
            [],
            f"choose one of {', '.join(map(str, fitting))}.",
        )
    )
