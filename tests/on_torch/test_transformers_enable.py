"""`enable(model)`: what an existing script does with the model goes on as before.

The oracle is the same model or training run without checkpointing, under the same disturbed choices.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import pickle

import pytest
import torch

from roundpipe_torch import OptionError, VerifyWarning, checkpoint, record, remat, replay, save_for_recompute
from tests.on_torch.hugging import Operations, model_of, shaky, step, tokens
from tests.on_torch.oracle import same

transformers = pytest.importorskip("transformers")

from roundpipe_torch.integrations import transformers as integration  # noqa: E402
from roundpipe_torch.integrations.transformers import LayerCheckpoint, disable, enable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


def functions(model):
    return [m._gradient_checkpointing_func for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]


def is_ours(model):
    found = functions(model)
    return bool(found) and all(isinstance(function, LayerCheckpoint) for function in found)


@pytest.fixture
def mixtral():
    return model_of("mixtral")


@pytest.fixture
def want(mixtral):
    return step(copy.deepcopy(mixtral))


def test_the_model_comes_back_unchanged(mixtral):
    before = mixtral.config.to_dict(), list(mixtral.state_dict()), type(mixtral), mixtral.forward
    assert enable(mixtral) is mixtral
    assert before == (mixtral.config.to_dict(), list(mixtral.state_dict()), type(mixtral), mixtral.forward)
    assert mixtral.is_activation_checkpointing
    assert is_ours(mixtral)


# Models of every kind

SOME = "llama gpt2 bert t5 opt gemma3_text mamba bart gpt_neox falcon mpt deberta-v2 rwkv blenderbot"


@pytest.mark.parametrize("name", SOME.split())
def test_models_without_experts(name):
    model = model_of(name)
    want = step(copy.deepcopy(model))
    same(step(enable(model)), want)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_implementation(experts, attention):
    model = model_of("qwen3_moe", _experts_implementation=experts, _attn_implementation=attention)
    want = step(copy.deepcopy(model))
    same(step(enable(model)), want)


def test_half_precision(mixtral):
    model = mixtral.to(torch.bfloat16)
    want = step(copy.deepcopy(model))
    same(step(enable(model)), want)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe", "gpt_oss", "jamba", "granitemoe", "phimoe"])
def test_router_logits_and_the_loss_on_them(name):
    model = model_of(name)
    inputs = {"output_router_logits": True, "labels": tokens()}
    want = step(copy.deepcopy(model), **inputs)
    torch.manual_seed(0)
    out = enable(model)(input_ids=tokens(), use_cache=False, **inputs)
    experts = sum("router" in type(m).__name__.lower() for m in model.modules())
    assert len(out.router_logits) == experts > 0
    assert out.aux_loss.requires_grad
    same(step(model, **inputs), want)


def test_a_cache_is_left_out(mixtral, want):
    got = step(enable(mixtral), use_cache=True)
    same(got, want)
    assert mixtral(input_ids=tokens(), use_cache=True).past_key_values is None


def test_a_mask_for_padded_tokens(mixtral):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    want = step(copy.deepcopy(mixtral), attention_mask=mask)
    same(step(enable(mixtral), attention_mask=mask), want)


def test_several_backwards(mixtral):
    def grads(model):
        with shaky():
            out = model(input_ids=tokens(), labels=tokens(), use_cache=False)
            out.loss.backward(retain_graph=True)
            out.logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    want = grads(copy.deepcopy(mixtral))
    same(grads(enable(mixtral)), want, within=1e-7)


def test_evaluation_and_generation(mixtral):
    plain = copy.deepcopy(mixtral).eval()
    enable(mixtral)
    for training in (False, True):
        mixtral.train(training)
        with torch.no_grad():
            same(mixtral(input_ids=tokens()).logits, plain(input_ids=tokens()).logits)
            got = mixtral.generate(tokens(), max_new_tokens=4, do_sample=False)
        same(got, plain.generate(tokens(), max_new_tokens=4, do_sample=False))


# Off, on, copied, saved


def test_off_and_on_again(mixtral, want):
    enable(mixtral)
    mixtral.activation_checkpointing_disable()
    assert not mixtral.is_activation_checkpointing
    same(step(mixtral), want)
    mixtral.activation_checkpointing_enable()
    assert is_ours(mixtral)
    same(step(mixtral), want)
    with pytest.warns(FutureWarning):
        mixtral.gradient_checkpointing_disable()
    with pytest.warns(FutureWarning):
        mixtral.gradient_checkpointing_enable({"use_reentrant": False})
    assert is_ours(mixtral)

    assert disable(mixtral) is mixtral
    assert not mixtral.is_activation_checkpointing
    mixtral.activation_checkpointing_enable()
    assert not is_ours(mixtral)
    other = model_of("mixtral")
    other.activation_checkpointing_enable()
    assert not is_ours(other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(mixtral, want, copied):
    twin = copied(enable(mixtral))
    twin.activation_checkpointing_enable()
    assert is_ours(twin)
    same(step(twin), want)
    assert all(p.grad is None for p in mixtral.parameters())


def test_a_pickle_read_by_a_process_that_enabled_nothing(mixtral, monkeypatch):
    pickled = pickle.dumps(enable(mixtral))
    base = transformers.PreTrainedModel
    monkeypatch.setattr(base, "_set_gradient_checkpointing", base._set_gradient_checkpointing.__wrapped__)
    integration._install.cache_clear()
    twin = pickle.loads(pickled)
    twin.activation_checkpointing_enable()
    assert is_ours(twin)


def test_saving_and_loading(mixtral, tmp_path):
    enable(mixtral).save_pretrained(tmp_path)
    loaded = type(mixtral).from_pretrained(tmp_path)
    assert not loaded.is_activation_checkpointing
    same(loaded.state_dict(), mixtral.state_dict())


# Options


def test_every_other_layer(mixtral, want):
    enable(mixtral, every_n_layers=2)
    layers = mixtral.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]
    same(step(mixtral), want)


def test_the_second_engine(mixtral, want):
    enable(mixtral, use_reentrant=True)
    same(step(mixtral), want)
    mixtral.activation_checkpointing_enable({"use_reentrant": False})
    assert functions(mixtral)[0].options["use_reentrant"]  # what enable was given counts


def test_torchs_keywords_given_later(mixtral, want):
    enable(mixtral)
    mixtral.activation_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
    assert is_ours(mixtral)
    assert functions(mixtral)[0].options["use_reentrant"]
    same(step(mixtral), want)


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="transformers would offload from CUDA"
)
def test_offload(mixtral, want):
    enable(mixtral)
    mixtral.activation_checkpointing_enable(offload=True)
    assert is_ours(mixtral)
    assert functions(mixtral)[0].offload == "cpu"
    same(step(mixtral), want)


def test_verify_names_the_layer(mixtral):
    enable(mixtral, verify="warn")
    with pytest.warns(VerifyWarning, match=r"'model\.layers\.[01] \(MixtralDecoderLayer\)'.*"), shaky():
        mixtral(input_ids=tokens(), use_cache=False).logits.sum().backward()


def test_without_auto(mixtral, want):
    got = step(enable(mixtral, auto=False))
    assert any(not torch.allclose(got["grads"][name], grad) for name, grad in want["grads"].items())


def test_errors(monkeypatch):
    with pytest.raises(OptionError, match="supports gradient checkpointing"):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(OptionError, match="supports gradient checkpointing"):
        enable(model_of("jetmoe"))
    for bad in (0, "2", True):
        with pytest.raises(OptionError, match="every_n_layers must be 1 or more"):
            enable(model_of("mixtral"), every_n_layers=bad)
    with pytest.raises(OptionError, match="no option 'verfy'"):
        enable(model_of("mixtral"), verfy="warn")
    model = enable(model_of("mixtral"))
    with pytest.raises(OptionError, match="not torch's function"):
        model._set_gradient_checkpointing(True, lambda f, *a: f(*a))
    monkeypatch.setattr(type(model), "_set_gradient_checkpointing", lambda self, *args, **kwargs: None)
    with pytest.raises(OptionError, match="in a way of its own"):
        enable(model_of("mixtral"))


# Around and inside


class Wrapped(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_a_wrapped_model(mixtral, want):
    wrapped = enable(Wrapped(mixtral))
    assert isinstance(wrapped, Wrapped)
    assert is_ours(mixtral)
    same(step(mixtral), want)


def test_a_region_around_the_model(mixtral):  # R8
    def run(way, model):
        with shaky():
            way(
                lambda embeds: model(inputs_embeds=embeds, use_cache=False).logits, embeddings
            ).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    embeddings = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    want = run(lambda function, x: function(x), copy.deepcopy(mixtral))
    same(run(checkpoint, enable(copy.deepcopy(mixtral))), want)
    same(run(lambda function, x: remat(function, auto=True)(x), copy.deepcopy(mixtral)), want)


def test_a_router_that_saves_its_choice_itself(mixtral, want):
    """Somebody edited the model: the save in it and the watching agree."""
    enable(mixtral)
    for layer in mixtral.model.layers:
        gate = layer.mlp.gate

        def forward(hidden, gate=gate, inner=gate.forward):
            logits, scores, idx = inner(hidden)
            (idx,) = save_for_recompute(idx)
            return logits, scores, idx

        gate.forward = forward
    same(step(mixtral), want)


def test_the_host_waits_for_nothing_in_backward():
    def waits(model):
        loss = model(input_ids=tokens(), use_cache=False).logits.mean()
        with Operations() as backward:
            loss.backward()
        return backward.counts["_local_scalar_dense"] + backward.counts["nonzero"]

    model = model_of("mixtral", _experts_implementation="eager")
    stock = copy.deepcopy(model)
    stock.activation_checkpointing_enable()
    assert waits(stock) > 8
    assert waits(enable(model)) == 0


# LoRA and Trainer


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("order", ["before", "after"])
def test_lora_on_a_frozen_base(mixtral, order):
    import peft

    def adapted(model):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = peft.get_peft_model(model, config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter)
        return model.train()

    want = step(adapted(copy.deepcopy(mixtral)))
    model = adapted(enable(mixtral)) if order == "before" else enable(adapted(mixtral))
    got = step(model)
    assert all("lora" in name for name in got["grads"])
    assert len(got["grads"]) == 8
    same(got, want)
    assert is_ours(model)


STEPS = 50


def losses(model, tmp_path, steps=STEPS, **arguments):
    rows = [torch.arange(8) * step % 50 + 3 for step in (1, 3, 5, 7)]
    data = [{"input_ids": row, "labels": row} for row in rows * 16]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
            **arguments,
        ),
        train_dataset=data,
    )
    with shaky(size=0.2):
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.filterwarnings("ignore")  # theirs
def test_trainer_has_the_same_losses(tmp_path):
    settings = {"router_aux_loss_coef": 0.1, "output_router_logits": True, "attention_dropout": 0.1}
    want = losses(model_of("mixtral", **settings), tmp_path)
    assert len(want) == STEPS
    assert want[-1] < 0.8 * want[0]

    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    model = enable(model_of("mixtral", **settings))
    assert losses(model, tmp_path, **checkpointing) == want
    assert is_ours(model)

    short = losses(model_of("mixtral", **settings), tmp_path, steps=5)
    assert losses(enable(model_of("mixtral", **settings)), tmp_path, steps=5) == short
    assert stock_losses(model_of("mixtral", **settings), tmp_path, steps=5) != short


def stock_losses(model, tmp_path, steps):
    try:
        return losses(model, tmp_path, steps, gradient_checkpointing=True)
    except torch.utils.checkpoint.CheckpointError as error:
        return error


def test_a_tape_of_an_evaluation_trains(mixtral):  # R13
    """Layers are regions for a tape in evaluation too, where transformers checkpoints nothing."""
    model, ids = enable(mixtral).eval(), tokens()
    with record() as tape, torch.no_grad():
        model(ids)
    names = sorted({entry.layer for entry in tape.entries()})
    assert names == [f"model.layers.{n} (MixtralDecoderLayer)" for n in range(model.config.num_hidden_layers)]

    def gradients(training, around):
        model.zero_grad()
        with around, shaky(seed=1) if isinstance(around, replay) else contextlib.nullcontext():
            loss = model.train(training)(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    want = gradients(False, contextlib.nullcontext())
    for training in (False, True):
        same(gradients(training, replay(tape)), want, within=1e-5)
