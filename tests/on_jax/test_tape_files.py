"""Arrays of JAX in tape files (R13)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roundpipe_core._backend import frontend
from roundpipe_jax import Tape, TapeError, diff, record, save_for_recompute


def recorded(value: Any) -> Tape:
    with record() as tape:
        save_for_recompute(value)
    return tape


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"])
def test_arrays_come_back(dtype: str, tmp_path: Path) -> None:
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    tape = recorded({"a": array})
    tape.save(tmp_path / "a.tape")

    loaded = Tape.load(tmp_path / "a.tape")

    (entry,) = loaded.entries()
    backend = frontend("jax")
    assert backend is not None
    back = backend.adopt(entry.value, array)
    assert (entry.item, entry.dtype, entry.value.origin) == ("[0]['a']", dtype, "jax")
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert not diff(tape, loaded)


def test_what_has_no_values_yet_is_refused(tmp_path: Path) -> None:
    def save(x: jax.Array) -> jax.Array:
        with record() as tape:
            save_for_recompute(x)
        with pytest.raises(TapeError, match=r"item \[0\]: an array whose values cannot be read") as caught:
            tape.save(tmp_path / "a.tape")
        assert "save the tape outside of jit" in str(caught.value)
        return x

    jax.jit(save)(jnp.arange(3.0))
    jax.vmap(save)(jnp.arange(3.0))
    assert list(tmp_path.iterdir()) == []


def test_other_arrays_of_jax_are_named(tmp_path: Path) -> None:
    for array, fault in [
        (jax.random.key(0), r"an array of dtype key<fry>(?s:.*)of a key, its data"),
        (jnp.arange(3).astype("int4"), "an array of dtype int4"),
    ]:
        with pytest.raises(TapeError, match=fault):
            recorded(array).save(tmp_path / "a.tape")
    deleted = jnp.arange(3)
    tape = recorded(deleted)
    deleted.delete()
    with pytest.raises(TapeError, match="an array whose values cannot be read"):
        tape.save(tmp_path / "a.tape")


def test_routing_and_masks_of_jax() -> None:
    routing = jnp.arange(12, dtype="int16").reshape(2, 3, 2)

    tape = Tape.from_routing(routing, experts=12, mask=jnp.array([[False, True, True]]), padding=0)

    assert np.array_equal(tape.to_routing()[0, 1:], routing)
