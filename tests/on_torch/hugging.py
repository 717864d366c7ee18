"""Tiny Hugging Face models of every architecture, and choices that no checkpoint repeats."""

from __future__ import annotations

import collections
import contextlib
import importlib

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_core._phase import Phase, thread

TINY = {
    32: "hidden_size d_model n_embd dim intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size "
    "out_hidden_size adapter_in_dim adapter_out_dim router_hidden_size downsample_hidden_size adapter_input_size",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size q_lora_rank "
    "kv_lora_rank expert_ffn_hidden_size index_head_dim qk_head_dim image_size share_expert_dim",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim d_kv sliding_window linear_key_head_dim "
    "linear_value_head_dim linear_head_dim mamba_d_state mamba_d_head mamba_n_heads mamba_num_heads mamba_head_dim "
    "ssm_state_size chunk_size mamba_chunk_size n_routed_experts",
    6: "num_experts num_local_experts moe_num_experts",
    4: "num_attention_heads n_head n_heads num_heads num_key_value_heads encoder_attention_heads "
    "decoder_attention_heads patch_size linear_num_value_heads linear_num_heads index_topk num_sliding_attention_heads",
    2: "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers depth "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_group num_expert_group index_n_heads "
    "linear_num_key_heads spatial_merge_size zero_expert_num eos_token_id index_kpool adapter_merge_size",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace num_dense_layers "
    "first_num_dense_layers decoder_sparse_step encoder_sparse_step mamba_n_groups n_groups bos_token_id",
    64: "vocab_size max_position_embeddings max_seq_len",
    3: "num_channels conv_L_cache",
    0: "pad_token_id moe_layer_start_index",
}
VALUES = {name: value for value, names in TINY.items() for name in names.split()}
ROPE_3D = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SPECIAL = {
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots3_note_text": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "rope_parameters": ROPE_3D},
    "flint": {"mlp_only_layers": []},
    "glm4v_moe_text": {"head_dim": 16, "rope_parameters": ROPE_3D},
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0},
    "hy_v4_vl_text": {"rope_parameters": ROPE_3D},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2},
    "mistral4": {"head_dim": None},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def moe_types():
    """Every architecture of the installed transformers that has experts, those inside others by their own name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = []
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # a configuration without defaults
            continue
        parts = {type(part) for part in vars(config).values() if hasattr(part, "to_dict")}
        if _has_experts(config) and not any(cls.model_type in CONFIG_MAPPING and _has_experts(cls()) for cls in parts):
            found.append(name)
    return found


def _has_experts(config):
    return any(
        ("expert" in name and type(value) is int and value > 0) or (hasattr(value, "to_dict") and _has_experts(value))
        for name, value in vars(config).items()
    )


def config_of(model_type):
    """A configuration with every size tiny."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _shrunk(CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {}))
    if model_type == "dbrx":
        config.attn_config.rope_theta, config.attn_config.clip_qkv = 1e4, 8.0  # the model wants them set
    config._attn_implementation = "eager"
    return config


def _shrunk(cls, special):
    given = cls()
    sizes = {}
    for name, value in given.to_dict().items():
        if name in VALUES and not isinstance(value, dict):
            sizes[name] = VALUES[name]
        elif name == "mlp_layer_types":
            sizes[name] = ["sparse", "sparse"]
    for name, value in vars(given).items():
        if hasattr(value, "to_dict"):
            sizes[name] = _shrunk(type(value), {})
    sizes = {name: value for name, value in (sizes | special).items() if value is not None}
    aliases = getattr(cls, "attribute_map", {})
    return cls(**{aliases.get(name, name): value for name, value in sizes.items()})


def model_of(model_type, **changes):
    """A tiny model with random weights, in training mode."""
    config = config_of(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(), _marked_where_uninitialised():
        torch.manual_seed(0)
        model = _class_of(config)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.isnan().any():
                parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    return model.train()


@contextlib.contextmanager
def _marked_where_uninitialised():
    """Memory that nobody has written to holds NaN, and not what was there before."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _class_of(config):
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto as auto

    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_MAPPING,
    ):
        if type(config) in mapping:
            cls = mapping[type(config)]
            return cls[0] if isinstance(cls, (tuple, list)) else cls
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    return next(
        cls
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and issubclass(cls, PreTrainedModel)
        and getattr(cls, "config_class", None) is type(config)
        and name.endswith(("ForCausalLM", "Model"))
        and not name.endswith("PreTrainedModel")
    )


CHOICES = ("topk", "sort", "max", "min", "argmax", "argmin")
DECISIONS = {*CHOICES, "nonzero", "_local_scalar_dense", "bincount", "histc", "multinomial", "kthvalue", "_unique2"}


@contextlib.contextmanager
def shaky(seed=0, size=0.5):
    """Disturb every choice: what a recompute chooses is not what the forward chose.

    Gives a counter of the choices of forwards and of recomputes; the numbers of the forwards are the same with and
    without checkpointing.
    """
    streams = {again: np.random.default_rng((seed, again)) for again in (False, True)}
    counts = collections.Counter()
    kept = {}

    def disturb(owner, name):
        inner = kept[owner, name] = getattr(owner, name)

        def disturbed(x, *args, **kwargs):
            if not x.dtype.is_floating_point or (name in ("max", "min") and not _has_dim(args, kwargs)):
                return inner(x, *args, **kwargs)
            again = thread.run is not None and thread.run.phase is Phase.RECOMPUTE
            counts[again] += 1
            noise = torch.from_numpy(streams[again].standard_normal(tuple(x.shape))).to(x.dtype)
            scale = size * (x.detach().nan_to_num(0, 0, 0).abs().mean() + 1e-3)
            chosen = inner(x.detach() + noise * scale, *args, **kwargs)
            if name.startswith("arg"):
                return chosen
            at = 1 if name == "topk" else 0
            dim = kwargs.get("dim", args[at] if len(args) > at else -1)
            flat = chosen.indices.dim() < x.dim()
            values = x.gather(dim, chosen.indices.unsqueeze(dim) if flat else chosen.indices)
            return type(chosen)((values.squeeze(dim) if flat else values, chosen.indices))

        setattr(owner, name, disturbed)

    for name in CHOICES:
        disturb(torch, name)
        disturb(torch.Tensor, name)
    try:
        yield counts
    finally:
        for (owner, name), inner in kept.items():
            setattr(owner, name, inner)


def _has_dim(args, kwargs):
    return isinstance(kwargs.get("dim", args[0] if args else None), int)


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        of_all = name in ("max", "min") and len(func._schema.returns) == 1  # a check of older torch: it chooses nothing
        self.counts[f"{name} of all" if of_all else name] += 1
        return func(*args, **(kwargs or {}))

    def decisions(self):
        return {name: count for name, count in self.counts.items() if name in DECISIONS}


def tokens(rows=2, length=12, seed=2):
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model, seed=0, use_cache=False, **inputs):
    """One training step under disturbed choices: everything that must not depend on checkpointing.

    A cache changes the layout of keys and values, and with it the last bit.
    """
    ids = tokens()
    if "inputs_embeds" not in inputs:
        inputs = {"input_ids": ids, **inputs}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    model.zero_grad()
    torch.manual_seed(3)
    with shaky(seed) as counts:
        out = model(**inputs, use_cache=use_cache)
        outputs = out.logits if "logits" in out else out[0]
        aim = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4))
        loss = (outputs.float() * aim).mean()
        if getattr(out, "aux_loss", None) is not None:
            loss = loss + out.aux_loss
        with Operations() as backward:
            loss.backward()
    return {
        "loss": loss.detach(),
        "choices": counts[False],
        "decisions in backward": backward.decisions(),
        "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }
