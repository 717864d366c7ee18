"""Every mixture of experts in the installed transformers: its routers decide once, without a change to its code.

The oracle is the same model without checkpointing, under the same disturbed choices. Torch's checkpointing fails.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from tests.on_torch.hugging import model_of, moe_types, step
from tests.on_torch.oracle import same

pytest.importorskip("transformers")

NOT_TESTED = {
    "jetmoe": "does not support gradient checkpointing",
    "dots3_note_vision_encoder": "an encoder of images",
    "vitpose_backbone": "an encoder of images whose experts are chosen by the caller",
}
MODELS = [name for name in moe_types() if name not in NOT_TESTED]


def test_the_list_is_that_of_the_installed_transformers():
    assert len(MODELS) > 60
    assert {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "phimoe"} < {*MODELS}
    assert {"granitemoe", "llama4_text", "jamba", "ernie4_5_moe", "glm4_moe"} < {*MODELS}
    assert NOT_TESTED.keys() <= {*moe_types()}
    assert not model_of("jetmoe").supports_gradient_checkpointing


@pytest.mark.parametrize("name", MODELS)
def test_gradients_with_routers_that_would_flip(name):
    from roundpipe_torch.integrations.transformers import enable

    model = model_of(name)
    inputs = {}
    if name == "qwen3_omni_moe_talker_text":  # its tokens are embedded by the model around it
        inputs["inputs_embeds"] = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))
    run = functools.partial(step, **inputs)

    want = run(copy.deepcopy(model))
    got = run(enable(copy.deepcopy(model)))

    assert want["choices"] > 0
    same(got, want)
    assert _is_wrong(run, model, want)


def _is_wrong(run, model, want):
    """What torch's checkpointing makes of it: an error at best."""
    model.activation_checkpointing_enable()
    try:
        got = run(model)
    except torch.utils.checkpoint.CheckpointError:
        return True
    errors = [(got["grads"][name] - grad).norm() / (grad.norm() + 1e-12) for name, grad in want["grads"].items()]
    return max(errors) > 1e-2
