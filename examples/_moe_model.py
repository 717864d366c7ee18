"""A small mixture-of-experts language model whose router is the one of real training: loss-free load balancing.

Each expert has a bias that every forward moves: up if the expert got less than its share of the tokens, down if
it got more. It is added to the scores to choose the experts, and for nothing else (DeepSeek-V3, arXiv:2412.19437,
section 2.1.2). So a layer that is simply run a second time chooses with other biases than the first time, and
moves them once more.

Every shape here is static, as in large systems: an expert has room for C tokens. A second run that routes
differently therefore meets no shape that does not fit. It is silently another function.

Letters in names are axes, see `Sizes`; R = E * C are the rows of all experts together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _moe_weights import Sizes
from torch import Tensor, nn

from roundpipe_torch import doing_recompute, get_recompute_data, save_for_recompute

Plan = tuple[Tensor, ...]


class MoE(nn.Module):
    """Sends each token to K of E experts and adds up what they return."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        D, E, H = sizes.D, sizes.E, sizes.H
        self.gate_DE = nn.Parameter(torch.empty(D, E))
        self.up_EDH = nn.Parameter(torch.empty(E, D, H))
        self.down_EHD = nn.Parameter(torch.empty(E, H, D))
        self.bias_E: Tensor
        self.register_buffer("bias_E", torch.zeros(E))
        self.on_decision: Callable[[Plan], None] = _nobody_listens
        self.remembers = True  # False: as a layer is written that knows nothing of this library

    def forward(self, x_TD: Tensor) -> Tensor:
        scores_TE = torch.sigmoid(x_TD @ self.gate_DE)  # in both phases: the gate learns through them
        if self.remembers and doing_recompute():
            plan = get_recompute_data()
        else:
            plan = self.route(scores_TE.detach())
            self.on_decision(plan)
            if self.remembers:
                save_for_recompute(*plan)
        return self.run_experts(x_TD, scores_TE, *plan)

    @torch.no_grad()
    def route(self, scores_TE: Tensor) -> Plan:
        """The whole plan: the experts of each token, their rows, whether there was room, and the token of each row."""
        (T, E), K, C = scores_TE.shape, self.sizes.K, self.sizes.C(len(scores_TE))
        # Sorted, so that a token's line differs between two plans only if its experts do.
        chosen_TK = (scores_TE.float() + self.bias_E).topk(K, dim=-1).indices.sort(dim=-1).values
        load_E = chosen_TK.flatten().bincount(minlength=E)

        order = chosen_TK.flatten().argsort(stable=True)  # (token, choice) pairs by expert
        expert = chosen_TK.flatten()[order]
        place = torch.arange(T * K) - (load_E.cumsum(0) - load_E)[expert]  # in the queue of its expert
        row = torch.where(place < C, expert * C + place, E * C)
        row_TK = torch.empty_like(row).scatter_(0, order, row).view(T, K)
        token_R = torch.zeros(E * C + 1, dtype=torch.long).scatter_(0, row, order // K)[:-1].clone()
        kept_TK = row_TK < E * C

        if self.training:
            self.bias_E += self.sizes.bias_rate * torch.sign(load_E.float().mean() - load_E)
        return chosen_TK, row_TK * kept_TK, kept_TK, token_R

    def run_experts(
        self,
        x_TD: Tensor,
        scores_TE: Tensor,
        chosen_TK: Tensor,
        row_TK: Tensor,
        kept_TK: Tensor,
        token_R: Tensor,
    ) -> Tensor:
        E, D = self.sizes.E, self.sizes.D
        weights_TK = scores_TE.gather(1, chosen_TK)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True) * kept_TK
        x_ECD = x_TD.index_select(0, token_R).view(E, -1, D)
        y_ECD = torch.bmm(F.silu(torch.bmm(x_ECD, self.up_EDH)), self.down_EHD)
        y_TKD = y_ECD.view(-1, D).index_select(0, row_TK.flatten()).view(*row_TK.shape, D)
        return (y_TKD * weights_TK.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    """Causal attention, then experts. This is what gets checkpointed."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        D = sizes.D
        self.attention_norm_D = nn.Parameter(torch.empty(D))
        self.qkv_DF = nn.Parameter(torch.empty(D, 3 * D))
        self.out_DD = nn.Parameter(torch.empty(D, D))
        self.moe_norm_D = nn.Parameter(torch.empty(D))
        self.moe = MoE(sizes)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.dropout(self.attend(norm(x_BLD, self.attention_norm_D)))
        y_TD = self.moe(norm(x_BLD, self.moe_norm_D).flatten(0, 1))
        return x_BLD + self.dropout(y_TD.view_as(x_BLD))

    def attend(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        q, k, v = (x_BLD @ self.qkv_DF).view(B, L, 3, self.sizes.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(B, L, D) @ self.out_DD

    def dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.sizes.dropout, self.training)


class LanguageModel(nn.Module):
    """Bytes in, the loss of guessing the next byte out.

    `wrap` says how a block is run: it takes a block and its label and gives something to call in its place.
    """

    def __init__(self, sizes: Sizes, wrap: Callable[[Block, str], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.embed_VD = nn.Parameter(torch.empty(sizes.V, sizes.D))
        self.position_LD = nn.Parameter(torch.empty(sizes.L, sizes.D))
        blocks = [Block(sizes) for _ in range(sizes.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm_D = nn.Parameter(torch.empty(sizes.D))
        self.head_DV = nn.Parameter(torch.empty(sizes.D, sizes.V))
        self.run_block = [wrap(block, f"block {n}") for n, block in enumerate(blocks)]
        self.routers = [block.moe for block in blocks]

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        x_BLD = F.embedding(tokens_BL, self.embed_VD) + self.position_LD
        for run in self.run_block:
            x_BLD = run(x_BLD)
        logits = norm(x_BLD, self.norm_D) @ self.head_DV
        return F.cross_entropy(logits.float().flatten(0, 1), targets_BL.flatten())

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Take over `weights`, from `initial_weights`."""
        self.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})


def norm(x: Tensor, gain_D: Tensor) -> Tensor:
    return F.rms_norm(x, gain_D.shape, gain_D, eps=1e-6)


def _nobody_listens(plan: Any) -> None:
    return None
