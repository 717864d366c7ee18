"""JAX's part of the demo at a size of seconds: the stock flip is there, ours has none, and both frameworks agree."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundpipe_core import Tape
from tests.examples.scripts import EXAMPLES, imported

SMALL = ["--layers", "2", "--dim", "32", "--heads", "2", "--experts", "8", "--batch", "4", "--length", "48"]
SMALL += ["--dropout", "0", "--steps", "8", "--jax-steps", "6", "--ways", "jax,ours"]

for needed in ("jax", "torch", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(needed)
jax = importlib.import_module("jax")
torch = importlib.import_module("torch")
moe_lm = imported("moe_lm")
model = imported("_moe_jax")
in_jax = imported("_moe_jax_training")
in_torch = imported("_moe_training")
results = imported("_moe_results")
settings = imported("_moe_settings")
weights = imported("_moe_weights")
side_by_side = imported("_moe_side_by_side")
for late in ("_moe_torch_results", "_moe_jax_results"):  # imported by the script when it needs them
    imported(late)

pytestmark = pytest.mark.timeout(300)  # the compiler's work is 20 seconds of a core, shared with other tests
QUICKLY = {"xla_backend_optimization_level": 0}
ROUNDING = 1e-5  # float32 has 2**-24, 6e-8; sums of hundreds of products, and losses of 3 to 6
TINY = weights.Sizes(layers=1, D=16, E=4, K=2, L=12, V=32, heads=2, dropout=0.0)


# One run, looked at from several sides. Its time is that of XLA's compiler, and a fixture would be paid for by each
# worker that runs some of the tests.


def test_a_small_run_in_both_frameworks(
    tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_jax, "COMPILER", QUICKLY)
    assert moe_lm.main([*SMALL, "--out", str(tmp_path)]) == 0

    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    ways = {way["name"]: way for way in report["jax"]["ways"]}
    for look in (
        ours_routes_as_the_forward_did_and_has_the_gradient_of_that,
        jax_checkpoint_flips_tokens_and_its_gradient_is_off,
        ours_decides_once,
        all_ways_start_alike_and_learn,
    ):
        with subtests.test(look.__name__):
            look(ways)
    with subtests.test("the probe does not change what it looks at"):
        assert report["jax"]["probe_is_harmless"] is True
    with subtests.test("both frameworks compute the same loss"):
        both_compute_the_same_loss(report)
    with subtests.test("side by side, the tapes keep them together"):
        the_tapes_keep_them_together(tmp_path, report["side"])
    with subtests.test("the page has a section for each framework"):
        the_page_has_a_section_for_each_framework(tmp_path, report)


def ours_routes_as_the_forward_did_and_has_the_gradient_of_that(ways: dict[str, dict[str, Any]]) -> None:
    assert ways["ours"]["flipped"] == [[0, 0]] * 6
    assert ways["ours"]["pinned_error"] == 0
    assert set(ways["ours"]["pinned_errors"].values()) == {0.0}


def jax_checkpoint_flips_tokens_and_its_gradient_is_off(ways: dict[str, dict[str, Any]]) -> None:
    assert sum(map(sum, ways["jax"]["flipped"])) > 0
    assert ways["jax"]["flipped_steps"] > 0
    first = ways["jax"]["flipped"][0]  # which steps are hit is up to the release of XLA
    assert first != [0, 0] or jax.__version_info__ >= (0, 12)
    assert (ways["jax"]["pinned_error"] > 1e-3) is (first != [0, 0])
    assert ways["none"]["flipped"] is None


def ours_decides_once(ways: dict[str, dict[str, Any]]) -> None:
    assert {name: way["decisions"] for name, way in ways.items()} == {"none": 1, "jax": 2, "ours": 1}


def all_ways_start_alike_and_learn(ways: dict[str, dict[str, Any]]) -> None:
    assert len({way["losses"][0] for way in ways.values()}) == 1
    for way in ways.values():
        assert len(way["losses"]) == 6
        assert all(map(math.isfinite, way["losses"]))
        assert way["held_out_loss"] < way["losses"][0]


def both_compute_the_same_loss(report: dict[str, Any]) -> None:
    one, two = report["ways"][0]["losses"], report["jax"]["ways"][0]["losses"]

    # bfloat16 has 8 bits; that a logit is off by 2**-8 of its size moves a loss of 5.7 by less than 0.02.
    assert one[0] == pytest.approx(two[0], abs=0.02)
    assert np.abs(np.subtract(one[:6], two)).mean() < 0.05


def the_tapes_keep_them_together(folder: Path, side: dict[str, Any]) -> None:
    decides, replays = side["ways"]
    assert (decides["name"], replays["name"]) == ("decides", "replays")
    assert len(side["losses"]) == 8
    assert replays["flipped"] == [[0, 0]] * 8
    assert max(replays["loss_differences"]) < ROUNDING
    assert max(replays["gradient_distances"]) < ROUNDING * 10
    assert max(replays["weight_distances"]) < ROUNDING
    one, two = (Tape.load(folder / name).to_routing(item="[0]") for name in ("torch.tape", "jax.tape"))
    assert decides["flipped"][-1] == (one != two).any(-1).sum(0).tolist()


def the_page_has_a_section_for_each_framework(folder: Path, report: dict[str, Any]) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")

    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "PyTorch",
        "JAX",
        "PyTorch and JAX, side by side",
        "How it was measured",
    ]
    assert "jax.checkpoint" in page
    assert f"jax {jax.__version__}" in page
    assert page.count("data:image/png;base64,") == len(list(folder.glob("*.png")))
    assert {path.stem for path in folder.glob("jax_*.png")} == {"jax_loss", "jax_flips", "jax_gradient"}
    assert {path.stem for path in folder.glob("side_*.png")} >= {"side_loss", "side_distances", "side_flips"}
    assert report["ours_followed_the_oracle"] is True
    assert report["ours_kept_the_routing_in_jax"] is True
    assert report["jax_followed_the_tapes"] is True


# Parts


def test_without_rounding_both_frameworks_have_the_same_gradient() -> None:
    """float32: what is left are orders of summation, a few units of 2**-24."""
    arrays = weights.initial_weights(TINY, seed=0)
    batch = np.random.default_rng(0).integers(0, TINY.V, (2, TINY.L + 1))
    ours = in_torch.LanguageModel(TINY, in_torch.WAYS["none"])
    ours.load(arrays)
    loss = ours(torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:]))
    loss.backward()

    twin = model.Model(TINY, np.dtype("float32"), model.WAYS["none"])
    start = {name: jax.numpy.asarray(value) for name, value in arrays.items()}
    biases = [start.pop("blocks.0.moe.bias_E")]
    (value, plans), gradient = jax.jit(jax.value_and_grad(twin.loss, has_aux=True), compiler_options=QUICKLY)(
        start, None, biases, None, *in_jax.split(batch)
    )

    assert float(value) == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in ours.named_parameters():
        np.testing.assert_allclose(gradient[name], parameter.grad, rtol=1e-3, atol=1e-6, err_msg=name)
    moved = model.moved(TINY, biases[0], plans[0])
    np.testing.assert_allclose(moved, ours.routers[0].bias_E, rtol=1e-6)


def test_beside_torch_a_tie_parts_them_unless_the_tape_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts of the same score, and the frameworks take another one of them."""

    def tied(sizes: Any, seed: int) -> dict[str, np.ndarray]:
        arrays = weights.initial_weights(sizes, seed)
        gate_DE = arrays["blocks.0.moe.gate_DE"]
        gate_DE[:, 1] = gate_DE[:, 0]
        return arrays

    monkeypatch.setattr(in_jax, "COMPILER", QUICKLY)
    monkeypatch.setattr(in_torch, "initial_weights", tied)
    together = side_by_side.SideTraining(TINY, settings.Settings(3, 1e-2, "float32", 0), tmp_path)
    for seed in range(3):
        together.step(np.random.default_rng(seed).integers(0, TINY.V, (2, TINY.L + 1)))
    decides, replays = together.results().ways

    assert decides.departs() == 1
    assert max(decides.loss_differences) > 1000 * ROUNDING
    assert decides.weight_distances[-1] > 1000 * ROUNDING
    assert [len(its) for its in decides.flipped_last] == decides.flipped[-1]
    assert replays.departs() is None
    assert max(replays.loss_differences) < ROUNDING
    assert max(replays.gradient_distances) < ROUNDING
    assert replays.weight_distances[-1] < ROUNDING


def test_the_optimizer_is_torchs() -> None:
    how = settings.Settings(steps=5, learning_rate=0.1, precision="float32", seed=0)
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=4).astype("float32"), random.normal(size=(3, 4)).astype("float32")
    theirs = torch.from_numpy(start.copy()).requires_grad_()
    optimizer = torch.optim.AdamW([theirs], betas=how.betas, eps=how.epsilon, weight_decay=how.decay)
    zeros = {"w": jax.numpy.zeros(4)}
    update = jax.jit(partial(in_jax.updated, TINY, how))
    state = in_jax.State({"w": jax.numpy.asarray(start)}, [], (zeros, zeros))

    for n, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = how.rate(n)
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        state = update(state, {"w": gradient}, [], np.float32(how.rate(n)), np.float32(n + 1))

    np.testing.assert_allclose(state.weights["w"], theirs.detach(), rtol=1e-5)


def test_weights_are_those_of_torch() -> None:
    arrays = weights.initial_weights(TINY, seed=3)
    theirs = in_torch.trainees(["none"], TINY, settings.Settings(1, 1e-3, "float32", 3))[0].model.state_dict()

    assert set(theirs) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)


def way(name: str, **facts: Any) -> Any:
    given: dict[str, Any] = {"flipped": [[0]], "flipped_tokens": 0.0, "pinned_error": 0.0} | facts
    fields = dict.fromkeys(results.JaxWay.__dataclass_fields__) | given
    return results.JaxWay(**{**fields, "name": name})


@pytest.mark.parametrize("wrong", [{"flipped": [[1]], "flipped_tokens": 1.0}, {"pinned_error": 1e-9}])
def test_a_flip_or_a_deviation_of_ours_fails_the_run(wrong: dict[str, Any]) -> None:
    def passed(ours: Any) -> bool:
        found = results.JaxResults([way("none"), ours], None, 1.0, 1.0, 1)
        return results.Results([], found, None, {}, {}, {}, 1, 1).passed()

    assert passed(way("ours"))
    assert not passed(way("ours", **wrong))


def test_a_replayed_run_that_routes_otherwise_fails_the_run() -> None:
    def passed(*flipped: list[int]) -> bool:
        ways = [results.SideWay("decides", flipped=[[5]]), results.SideWay("replays", flipped=list(flipped))]
        return results.Results([], None, results.SideBySide([5.0], ways, 1), {}, {}, {}, 1, 1).passed()

    assert passed([0, 0], [0, 0])
    assert not passed([0, 0], [0, 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--frameworks", "tf"], "argument --frameworks: 'tf' is not one of torch, jax"),
        (["--frameworks", ","], "argument --frameworks: name at least one of torch, jax"),
        (["--jax-steps", "0"], "argument --jax-steps: 0 is less than 1"),
        (["--side-steps", "-1"], "argument --side-steps: -1 is less than 0"),
    ],
)
def test_a_wrong_option_is_a_clear_error(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        moe_lm.main(["--out", str(tmp_path), *options])

    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "called"), [("jax", "JAX"), ("torch", "PyTorch")])
def test_a_missing_framework_is_a_clear_error(
    name: str, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moe_lm, "find_spec", lambda wanted: None if wanted == name else True)
    with pytest.raises(SystemExit):
        moe_lm.main(["--frameworks", name, "--out", str(tmp_path)])

    said = f"--frameworks {name}: {called} is not installed: pip install 'roundpipe-recompute[{name}]'"
    assert said in capsys.readouterr().err


def test_without_jax_the_other_part_is_run_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moe_lm, "find_spec", lambda wanted: None if wanted == "jax" else True)
    assert moe_lm.main([*SMALL, "--ways", "none", "--steps", "1", "--out", str(tmp_path)]) == 0

    assert "JAX is not installed: pip install 'roundpipe-recompute[jax]'. Its part is left out." in (
        capsys.readouterr().err
    )
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["jax"] is None


def test_without_torch_nothing_imports_it() -> None:
    code = "import sys, moe_lm, _moe_jax_results; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        timeout=100,
        env={"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}", "PATH": "", "JAX_PLATFORMS": "cpu"},
    )

    assert done.returncode == 0
