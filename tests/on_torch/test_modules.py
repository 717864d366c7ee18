"""remat of functions and modules: everything but the checkpointing stays as it was."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

from roundpipe_torch import (
    OptionError,
    checkpoint,
    checkpoint_sequential,
    doing_recompute,
    layer_scope,
    remat,
    save_for_recompute,
)

D = 6


class Moe(nn.Module):
    """A layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(D, D, generator=generator))
        self.inner = nn.Linear(D, D, bias=False)
        self.inner.weight = nn.Parameter(torch.randn(D, D, generator=generator))
        self.register_buffer("calls", torch.zeros(2))
        self.tag = "moe"
        self.phases: list[bool] = []

    def forward(self, x, scale: float = 1.0):
        self.phases.append(doing_recompute())
        if not doing_recompute():
            self.calls += 1
        (index,) = save_for_recompute((x @ self.w).detach().argmax(-1, keepdim=True))
        return torch.tanh(self.inner(x @ self.w)).gather(1, index) * scale


def inputs(seed: int = 5) -> torch.Tensor:
    return torch.randn(3, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_module_looks_as_before_and_trains_alike() -> None:
    plain, wrapped = Moe(), remat(Moe(), label="block")
    assert isinstance(wrapped, Moe)
    assert type(wrapped).__name__ == "Moe"
    assert repr(wrapped) == repr(plain)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in plain.named_modules()]
    assert wrapped.tag == "moe"
    assert inspect.getdoc(wrapped) == "A layer."
    assert inspect.signature(wrapped.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(wrapped).forward) == inspect.signature(Moe.forward)
    for module in (plain, wrapped):
        module(inputs(), scale=2.0).square().sum().backward()
    assert wrapped.phases == [False, True]
    assert plain.phases == [False]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))
    assert torch.equal(wrapped.calls, plain.calls)
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())


def test_the_original_stays_plain_and_shares_its_state() -> None:
    original = Moe()
    wrapped = remat(original)
    original(inputs()).sum().backward()
    assert original.phases == [False]
    wrapped.tag = "changed"
    assert original.tag == "changed"
    wrapped.double()
    assert original.w.dtype == torch.float64
    original.eval()
    assert wrapped.training is False


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy"])
def test_copies_checkpoint_too_and_are_independent(how) -> None:
    net = nn.Sequential(remat(Moe(), label="block"), nn.Linear(1, D))
    pending = net(inputs())
    if how == "deepcopy":
        twin = copy.deepcopy(net)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = nn.Sequential(copy.copy(net[0]), net[1])
    twin[0].phases = []
    twin(inputs()).sum().backward()
    assert twin[0].phases == [False, True]
    assert type(twin[0])._remat_options == {"label": "block"}
    if how != "copy":
        with torch.no_grad():
            twin[0].w.zero_()
        assert net[0].w.abs().max() > 0
    pending.sum().backward()
    assert net[0].w.grad is not None


def test_hooks_fire_as_without_checkpointing() -> None:
    def count(module):
        fired: list[str] = []
        module.register_forward_pre_hook(lambda *a: fired.append("pre"))
        module.register_forward_hook(lambda *a: fired.append("forward"))
        module.register_full_backward_hook(lambda *a: fired.append("backward"))
        module.w.register_hook(lambda grad: fired.append("grad"))
        module(inputs()).sum().backward()
        return fired

    assert count(remat(Moe())) == count(Moe())
    assert sorted(count(Moe())) == ["backward", "forward", "grad", "pre"]


def test_a_forward_put_on_the_instance_is_checkpointed() -> None:
    module = remat(Moe())
    phases = []
    original = module.forward

    def forward(x):
        phases.append(doing_recompute())
        return x.exp()

    module.forward = forward
    module(inputs()).sum().backward()
    assert phases == [False, True]
    assert callable(original)

    patched = Moe()
    patched.forward = forward
    remat(patched)(inputs()).sum().backward()
    assert phases == [False, True, False, True]


def test_a_forward_that_wraps_the_one_before_runs_all_of_them_once() -> None:
    """As those do who measure, cast or log: each keeps the method it found and calls it."""

    def wrapped(module, name):
        before = module.forward

        def forward(x, scale=1.0):
            ran.append((name, doing_recompute()))
            return before(x, scale=scale)

        module.forward = forward

    ran: list[tuple[str, bool]] = []
    plain, module = Moe(), remat(Moe())
    wrapped(module, "inner")
    wrapped(module, "outer")
    assert list(inspect.signature(module.forward).parameters) == ["x", "scale"]
    results = []
    for net in (plain, module):
        x = inputs()
        net(x, scale=2.0).square().sum().backward()
        results.append([x.grad, net.w.grad, net.calls])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert ran == [("outer", False), ("inner", False), ("outer", True), ("inner", True)]
    assert module.phases == [False, True]

    before = module.forward.__func__
    module.forward = functools.partial(before, module)  # as Accelerate does
    module(inputs()).sum().backward()
    assert len(ran) == 8
    del module.forward
    module.phases = []
    module(inputs()).sum().backward()
    assert module.phases == [False, True]
    assert len(ran) == 8


def test_a_base_class_forward_can_be_extended() -> None:
    class Twice(Moe):
        def forward(self, x):
            return super().forward(super().forward(x) * torch.ones(D))

    with pytest.raises(Exception, match="saved twice"):
        remat(Twice())(inputs())  # one layer, two unnamed saves (R4)

    class Scoped(Moe):
        def forward(self, x):
            for name in "ab":
                with layer_scope(name):
                    x = super().forward(x) * torch.ones(D)
            return x

    remat(Scoped())(inputs()).sum().backward()


def test_remat_again_replaces_the_options() -> None:
    module = remat(remat(Moe(), label="one"), label="two")
    module(inputs()).sum().backward()
    assert module.phases == [False, True]
    assert type(module)._remat_options == {"label": "two"}


def test_a_function_keeps_its_signature_and_a_decorator_works_in_every_form() -> None:
    def layer(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Scale."""
        phases.append(doing_recompute())
        return (x * scale).exp()

    phases: list[bool] = []
    for wrapped in (remat(layer), remat(label="mine")(layer), remat(layer, verify="off")):
        assert wrapped.__name__ == "layer"
        assert wrapped.__doc__ == "Scale."
        assert inspect.signature(wrapped) == inspect.signature(layer)
        phases.clear()
        wrapped(inputs(), scale=0.5).sum().backward()
        assert phases == [False, True]
    remat(functools.partial(layer, scale=3.0))(inputs()).sum().backward()
    remat(Moe().forward)(inputs()).sum().backward()


def test_a_method_can_be_decorated() -> None:
    class Layer(nn.Module):
        phases: list[bool] = []  # noqa: RUF012

        @remat(label="method")
        def forward(self, x):
            self.phases.append(doing_recompute())
            return x.exp()

    Layer()(inputs()).sum().backward()
    assert Layer.phases == [False, True]


def test_in_eval_and_without_grad_it_is_the_layer() -> None:
    module = remat(Moe()).eval()
    with torch.no_grad():
        module(inputs())
    module(inputs()).sum().backward()
    assert module.phases == [False, False, True]


def test_frozen_inputs_train_the_weights() -> None:
    plain, wrapped = Moe(), remat(Moe(), use_reentrant=True)
    for module in (plain, remat(plain), wrapped):
        module.zero_grad()
        module(inputs().detach()).square().sum().backward()
    assert torch.equal(plain.w.grad, wrapped.w.grad)


@pytest.mark.parametrize(
    ("options", "line", "way_out"),
    [
        ({"verfy": "warn"}, "remat has no option 'verfy'.", "did you mean 'verify'?"),
        ({"polcy": 1}, "remat has no option 'polcy'.", "leave it out."),
        ({"verify": "yes"}, "verify must be one of 'off', 'warn', 'raise', not 'yes'.", "pass verify='warn' to be"),
        ({"verify": ["warn"]}, "verify must be one of 'off', 'warn', 'raise', not ['warn'].", "pass "),
        ({"determinism_check": {}}, "determinism_check must be one of 'default', 'none', not {}.", "pass "),
        ({"label": 3}, "label must be a string, not 3.", 'name the layer, as in label="block 3".'),
        ({"use_reentrant": "no"}, "use_reentrant must be True or False, not 'no'.", "pass use_reentrant=True or "),
        ({"early_stop": []}, "early_stop must be True or False, not [].", "pass early_stop=True or "),
        ({"context_fn": 3}, "context_fn must be a function, not 3.", "pass one that gives two contexts"),
        ({"label": ["a"]}, "label must be a string, not ['a'].", "name the layer"),
    ],
)
def test_options_that_cannot_be(options, line, way_out) -> None:
    for build in (lambda: remat(Moe(), **options), lambda: remat(**options)(len)):
        with pytest.raises(OptionError) as caught:
            build()
        text = str(caught.value).splitlines()
        assert text[0] == line
        assert text[1] in ("  layer: 'Moe'", "  layer: 'len'")
        assert text[2].startswith(f"  called at: {__file__}:")
        assert text[-1].startswith(f"  way out: {way_out}")
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("target", [Moe, 3, nn.Linear, "layer"])
def test_targets_that_cannot_be(target) -> None:
    with pytest.raises(OptionError, match=r"remat takes a function or a module object, not"):
        remat(target)


def test_a_target_that_is_long_is_told_in_a_line() -> None:
    with pytest.raises(OptionError, match=r"^remat takes a function or a module object, not a Tensor\.\n"):
        remat(torch.ones(20, 20))
    with pytest.raises(OptionError, match=r"^remat takes a function or a module object, not the class Linear\.\n"):
        remat(nn.Linear)


def test_a_list_of_modules_is_no_layer() -> None:
    with pytest.raises(OptionError) as caught:
        remat(nn.ModuleList([nn.Linear(D, D)]))
    text = str(caught.value).splitlines()
    assert text[0] == "remat takes a layer, and ModuleList has no forward."
    assert text[-1] == "  way out: remat the modules in it: torch.nn.ModuleList(map(remat, modules))."


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_result_in_the_place_of_a_layer(use_reentrant) -> None:
    x = torch.ones(2, D, requires_grad=True)
    for call in (lambda y: checkpoint(y, use_reentrant=use_reentrant), lambda y: checkpoint(y, x)):
        with pytest.raises(OptionError, match=r"checkpoint takes a function and its arguments, not a Tensor") as caught:
            call(nn.Linear(D, 100)(x))
        assert str(caught.value).splitlines()[-1].endswith("checkpoint(layer, x) for layer(x).")


@pytest.mark.parametrize("option", [{"verify": "raise"}, {"label": "a"}, {"offload": "cpu"}, {"auto": True}])
def test_an_option_of_remat_given_to_checkpoint(option) -> None:
    (name,) = option
    x = torch.ones(2, D, requires_grad=True)
    with pytest.raises(OptionError) as caught:
        checkpoint(nn.Linear(D, D), x, **option)
    text = str(caught.value).splitlines()
    assert text[0] == f"{name!r} is no option of checkpoint, and no argument of the layer."
    assert text[-1] == f"  way out: pass it to remat: remat(layer, {name}=...)(x)."
    assert "unexpected keyword argument" in str(caught.value.__cause__)
    checkpoint(lambda x, **given: x * len(given), x, **option).sum().backward()  # an argument of this one
    assert x.grad.eq(1).all()
    with pytest.raises(TypeError, match="unexpected keyword argument 'wide'"):
        checkpoint(nn.Linear(D, D), x, wide=3)


async def waits(x):
    return x.sin()


def gives(x):
    yield x.sin()


async def both(x):
    yield x.sin()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("layer", [waits, gives, both, lambda x: (n * x for n in range(2))])
def test_a_layer_that_runs_when_it_is_over(layer, use_reentrant) -> None:
    """It would run outside of the region: not checkpointed, and without its saves."""
    x = torch.ones(2, D, requires_grad=True)
    for call in (remat(layer, use_reentrant=use_reentrant), lambda x: checkpoint(layer, x)):
        with pytest.raises(OptionError, match=r"the layer gives a (generator|coroutine), which runs when"):
            call(x)


# checkpoint_sequential


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5])
def test_sequential_layers_have_slots_of_their_own(segments, use_reentrant) -> None:
    def run(call):
        layers = nn.Sequential(*(nn.Sequential(Moe(n), nn.Linear(1, D, bias=False)) for n in range(5)))
        for layer in layers:
            nn.init.ones_(layer[1].weight)
        x = inputs()
        call(layers, x).square().sum().backward()
        return [x.grad, *(p.grad for p in layers.parameters())], [len(layer[0].phases) for layer in layers]

    want, _ = run(lambda layers, x: layers(x))
    got, phases = run(lambda layers, x: checkpoint_sequential(layers, segments, x, use_reentrant=use_reentrant))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    cut = 5 // segments * (segments - 1)
    assert phases == [2] * cut + [1] * (5 - cut)


def test_sequential_of_functions_and_its_errors() -> None:
    x = inputs()
    checkpoint_sequential([torch.exp, torch.sin, torch.tanh], 2, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().tanh().sum(), x)[0])
    assert checkpoint_sequential(nn.Sequential(), 1, x) is x
    with pytest.raises(OptionError, match=r"segments must be from 1 to the number of layers \(0\), not 2") as caught:
        checkpoint_sequential([], 2, x)
    assert str(caught.value).splitlines()[-1] == "  way out: pass fewer segments, or more layers."
    for segments in (0, 4, -1, "2"):
        with pytest.raises(
            OptionError, match=rf"segments must be from 1 to the number of layers \(3\), not {segments!r}"
        ):
            checkpoint_sequential([torch.exp, torch.sin, torch.tanh], segments, x)


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_sequential_layers_draw_again_what_they_drew_if_told_so(preserve_rng_state) -> None:
    drawn: list[float] = []

    def layer(x):
        drawn.append(torch.rand(()).item())
        return x.exp()

    checkpoint_sequential([layer, torch.sin], 2, inputs(), preserve_rng_state=preserve_rng_state).sum().backward()
    assert (drawn[0] == drawn[1]) is preserve_rng_state
