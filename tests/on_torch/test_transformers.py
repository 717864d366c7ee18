"""Hugging Face models and expert loops: gradient checkpointing through their own plumbing, and no waiting for the host.

The oracle is the same model without checkpointing, with the same router decisions.
"""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_torch import checkpoint, doing_recompute, get_recompute_data, recompute_once, save_for_recompute
from tests.on_torch.oracle import Counted, Source, by_remat, decided, leaf, plain, reentrant, same

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 32,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MODELS = {
    "Mixtral": {"num_local_experts": 6},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8},
    "GptOss": {
        "num_local_experts": 6,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def tiny(family):
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**COMMON, **MODELS[family]})
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).train()


def routers(model):
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def disturb(router, source, seed):
    """Noise that no checkpoint can repeat decides; the weights come from the whole softmax."""
    inner = router.forward
    torch.nn.init.normal_(router.weight, std=0.5, generator=torch.Generator().manual_seed(seed))

    def forward(hidden):
        if doing_recompute():
            (idx,) = get_recompute_data()
            logits, scores, _ = inner(hidden)
        else:
            logits, scores, _ = inner(hidden)
            idx = (logits.softmax(-1) + source.normal(*logits.shape)).topk(router.top_k, -1).indices
            save_for_recompute(idx)
        return logits, logits.float().softmax(-1).gather(1, idx).to(scores.dtype), idx

    router.forward = forward


def train(family, way, padded=False, aux=0.1):
    """Loss and gradients of a step, checkpointed by the model's own plumbing."""
    model, source, seen = tiny(family), Source(), []
    for n, router in enumerate(routers(model)):
        disturb(router, source, n)
        router.register_forward_hook(lambda m, given, out: None if doing_recompute() else seen.append(out[0]))
    if way is not plain:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        holders = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
        assert len(holders) > COMMON["num_hidden_layers"]
        for module in holders:
            module._gradient_checkpointing_func = way
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :5] = not padded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=True).loss
    if aux:
        loss = loss + aux * sum(logits.square().mean() for logits in seen)
    loss.backward()
    return {
        "loss": loss.detach(),
        "logits": len(seen),
        "decisions": source.asked,
        "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


@needs_transformers
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("way", [checkpoint, by_remat, reentrant], ids=["checkpoint", "remat", "reentrant"])
def test_a_model_with_disturbed_routers(family, way):
    way, aux = Counted(way), 0.0 if way is reentrant else 0.1
    want, got = train(family, plain, aux=aux), train(family, way, aux=aux)

    moe_layers = len(routers(tiny(family)))
    assert want["logits"] == want["decisions"] == moe_layers >= 1
    same(got, want)
    assert (way.regions, way.runs) == (2, 4)
    if family == "Mixtral" and way.way is checkpoint:
        same(train(family, checkpoint, padded=True), train(family, plain, padded=True))


@needs_transformers
def test_recorded_logits_and_the_reentrant_engine_do_not_lose_gradient_silently():
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        train("Mixtral", reentrant)


@needs_transformers
class Attends(torch.nn.Module):
    """To all chunks so far, and puts its own into the cache."""

    def __init__(self, n):
        super().__init__()
        self.n, self.key = n, torch.nn.Linear(4, 4)

    def forward(self, x, past_key_values):
        key = self.key(x)[:, None]
        known, _ = past_key_values.update(key.detach(), key.detach(), self.n)
        seen = torch.cat([known[:, :, : -x.shape[1]], key], 2)
        (best,) = save_for_recompute((key @ seen.mT).detach().argmax(-1, keepdim=True))
        return torch.nn.functional.scaled_dot_product_attention(key, seen, seen)[:, 0] + best[:, 0]


@needs_transformers
@pytest.mark.parametrize("way", [checkpoint, by_remat, reentrant])
def test_a_cache_among_the_arguments_is_what_it_was(way):
    """What the layer puts into it, it puts in once."""
    from transformers import DynamicCache

    def scenario(way):
        torch.manual_seed(0)
        layers, cache = [Attends(0), Attends(1)], DynamicCache()
        chunks = [leaf(2, 3, 4), leaf(2, 2, 4, seed=1)]
        outputs = []
        for x in chunks:
            for layer in layers:
                x = way(layer, x, past_key_values=cache)
            outputs.append(x)
        for out in outputs:  # the earlier first
            out.square().sum().backward()
        grads = [layer.key.weight.grad for layer in layers]
        return outputs, [x.grad for x in chunks], grads, cache.get_seq_length(), [one.keys for one in cache.layers]

    same(scenario(way), scenario(plain))


def test_another_routing_shows_in_the_gradients():
    """The oracle of the test above can tell."""
    model = tiny("Mixtral")
    grads = []
    for seed in (1, 2):
        model.zero_grad()
        for n, router in enumerate(routers(model)):
            router.__dict__.pop("forward", None)
            disturb(router, Source(seed), n)
        ids = torch.arange(24).view(2, 12)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append(model.model.layers[0].mlp.experts.down_proj.grad.clone())
    assert not torch.allclose(*grads)


# Host synchronisation: what a device would have to wait for

WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "item",
    "is_nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
}


class HostWaits(TorchDispatchMode):
    """Counts operations whose result, or its shape, the host has to wait for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func.overloadpacket is torch.ops.aten.index and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        self.count += func.overloadpacket.__name__ in WAITS or by_mask
        return func(*args, **(kwargs or {}))


TOKENS, WIDTH, EXPERTS, CHOSEN = 40, 8, 6, 2


class ExpertLoop(torch.nn.Module):
    """The loop over the experts that got a token, as Hugging Face models write it."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Parameter(leaf(WIDTH, EXPERTS).detach())
        self.up = torch.nn.Parameter(leaf(EXPERTS, WIDTH, WIDTH, seed=1).detach())
        self.source = Source()

    def route(self, x):
        return (x @ self.gate + self.source.normal(len(x), EXPERTS)).topk(CHOSEN, -1).indices

    def plan(self, idx):
        """For each expert in use: its number, its tokens, and which choice of theirs it was."""
        mask = torch.nn.functional.one_hot(idx, EXPERTS).permute(2, 1, 0)
        used = torch.greater(mask.sum((-1, -2)), 0).nonzero().flatten().tolist()
        return [(expert, *reversed(torch.where(mask[expert]))) for expert in used]

    def decide(self, x):
        idx = self.route(x)
        return idx, self.plan(idx)

    def forward(self, x, decide=None):
        scores = torch.softmax(x @ self.gate, -1)
        idx, plan = decide(lambda: self.decide(x))
        weights = scores.gather(1, idx)
        out = torch.zeros_like(x)
        for expert, token, choice in plan:
            y = torch.tanh(x.index_select(0, token) @ self.up[expert])
            out.index_add_(0, token, y * weights[token, choice, None])
        return out


class Sparse(torch.nn.Module):
    """The seed's other two: a nonzero, and a branch on a statistic."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(leaf(WIDTH, WIDTH).detach())

    def forward(self, x, decide=None):
        rows, positive = decide(lambda: ((x.sum(-1) > 0.5).nonzero().flatten(), (x.mean() > 0).item()))
        y = torch.zeros_like(x).index_copy(0, rows, x[rows] @ self.up)
        return torch.tanh(y) if positive else torch.sin(y)


def one_line(make):
    """Decides in both phases, and so skips nothing."""
    return save_for_recompute(*make())


@pytest.mark.parametrize(
    ("layer", "decide"),
    [
        (ExpertLoop, decided),
        (ExpertLoop, recompute_once),
        (Sparse, decided),
        (Sparse, recompute_once),
        (Sparse, one_line),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_backward_never_waits_for_the_host(layer, decide, nested):
    def step(way, decide):
        module, x = layer(), leaf(TOKENS, WIDTH, seed=3)
        run = (lambda v: way(lambda u: module(u, decide) + u, torch.sin(v))) if nested else lambda v: module(v, decide)
        loss = way(run, x).square().sum()
        with HostWaits() as waits:
            loss.backward()
        return [x.grad, *(p.grad for p in module.parameters())], waits.count

    def torchs(function, *args):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    want, without = step(plain, decide)
    got, ours = step(checkpoint, decide)
    same(got, want)
    assert without == 0
    assert ours == 0 if decide is not one_line else ours > 0
    if layer is Sparse:  # that repeats itself, so torch's gradient is right too
        repeated, theirs = step(torchs, lambda make: make())
        same(repeated, want)
        assert theirs >= 2


def test_torchs_recompute_waits_again_and_again():
    module, x = ExpertLoop(), leaf(TOKENS, WIDTH, seed=3)
    idx = module.route(x.detach())
    y = torch.utils.checkpoint.checkpoint(
        lambda x: module(x, lambda make: (idx, module.plan(idx))), x, use_reentrant=False
    )
    with HostWaits() as waits:
        y.sum().backward()
    assert waits.count > EXPERTS
