"""The sizes of the model and its initial weights, as numpy arrays: what a twin in another framework starts from too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sizes:
    """B sequences of L tokens; T = B * L tokens, D wide; E experts, H wide, K of them chosen for each token.

    An expert takes C tokens of a batch. What is sent to it beyond that is dropped: the residual passes it on.
    """

    layers: int
    D: int
    E: int
    K: int
    L: int
    V: int
    heads: int
    capacity: float = 1.5  # of what an expert gets if all get the same
    dropout: float = 0.1
    bias_rate: float = 0.001

    @property
    def H(self) -> int:  # noqa: N802
        return 2 * self.D

    def C(self, T: int) -> int:  # noqa: N802
        return min(T, math.ceil(T * self.K / self.E * self.capacity))


def initial_weights(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Weights under the names that the model gives them."""
    random = np.random.default_rng(seed)
    D, E, H = sizes.D, sizes.E, sizes.H

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        return random.normal(0.0, fan_in**-0.5, shape).astype(np.float32)

    weights = {
        "embed_VD": random.normal(0.0, 0.1, (sizes.V, D)).astype(np.float32),
        "position_LD": random.normal(0.0, 0.1, (sizes.L, D)).astype(np.float32),
    }
    for n in range(sizes.layers):
        weights |= {
            f"blocks.{n}.attention_norm_D": np.ones(D, np.float32),
            f"blocks.{n}.qkv_DF": normal(D, 3 * D, fan_in=D),
            f"blocks.{n}.out_DD": normal(D, D, fan_in=D * 2 * sizes.layers),
            f"blocks.{n}.moe_norm_D": np.ones(D, np.float32),
            f"blocks.{n}.moe.gate_DE": normal(D, E, fan_in=D),
            f"blocks.{n}.moe.up_EDH": normal(E, D, H, fan_in=D),
            f"blocks.{n}.moe.down_EHD": normal(E, H, D, fan_in=H * 2 * sizes.layers),
            f"blocks.{n}.moe.bias_E": np.zeros(E, np.float32),
        }
    weights["norm_D"] = np.ones(D, np.float32)
    weights["head_DV"] = normal(D, sizes.V, fan_in=4 * D)
    return weights
