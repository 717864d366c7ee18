"""usage: what regions hold, told per layer (R12). The oracle is counting by hand."""

from __future__ import annotations

import gc
import html.parser
import json
import threading
from typing import Any

import pytest
import torch

from roundpipe_torch import Usage, VerifyWarning, checkpoint, keep, recompute_once, remat, save_for_recompute, usage

X = torch.randn(16, 8, requires_grad=True)  # 512 bytes


def router(x: torch.Tensor) -> torch.Tensor:
    (best,) = save_for_recompute(x.detach().argmax(-1, keepdim=True))  # 16 int64: 128 bytes
    return x.exp().gather(-1, best)


def row(report: Usage, name: str) -> Any:
    return next(layer for layer in report.layers if layer.layer == name)


@pytest.mark.parametrize("engine", [False, True], ids=["default", "reentrant"])
def test_inputs_slots_and_decisions_by_layer(engine: bool) -> None:
    gate = remat(router, label="gate", use_reentrant=engine)
    other = remat(lambda x: x.sin().cos(), label="mlp", use_reentrant=engine)
    with usage() as report:
        kept = [gate(X), gate(other(X))]
        assert (row(report, "gate").calls, row(report, "gate").alive) == (2, 2)
        assert (row(report, "gate").inputs, row(report, "gate").slot, row(report, "gate").decisions) == (1024, 256, 2)
        assert (row(report, "mlp").inputs, row(report, "mlp").slot, row(report, "mlp").decisions) == (512, 0, 0)
        assert report.bytes == report.peak == 1536 + 256
        del kept[0]
        assert report.bytes == 1024 + 128
        kept[0].sum().backward()
        del kept[0]
        gc.collect()
    assert (report.bytes, report.peak) == (0, 1536 + 256)
    assert [layer.alive for layer in report.layers] == [0, 0]
    assert [layer.layer for layer in report.layers] == ["gate", "mlp"]


def test_outermost_regions_hold_what_is_inside() -> None:
    inner = remat(router, label="inner")

    def block(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + recompute_once(lambda: torch.ones(2, dtype=torch.int8))[0]

    with usage() as report:
        y = checkpoint(block, X)
    [outer] = report.layers
    assert (outer.inputs, outer.slot, outer.decisions) == (512, 130, 2)
    del y


def test_what_keep_holds() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return keep(torch.exp, x).sin()

    with usage() as report:
        y = remat(layer, label="layer")(X)
    assert row(report, "layer").kept == 512
    del y


def test_views_and_containers_and_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))

    def layer(parts: list[torch.Tensor], weight: torch.Tensor, *, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        return (parts[0].exp() @ weight)[:, :4] * parts[1].sum() * scale["s"]

    base = torch.randn(16, 8)
    with usage() as report:
        y = remat(layer, label="layer")([base, base[:4]], weight, scale={"s": torch.ones(4)})
    assert row(report, "layer").inputs == 512 + 16  # the views' memory once, the parameter not at all
    del y


def test_flips_that_verify_found() -> None:
    noise = iter([0.0, 100.0])

    def layer(x: torch.Tensor) -> torch.Tensor:
        tilt = torch.zeros(8)
        tilt[0] = next(noise, 0.0)
        (best,) = save_for_recompute((x.detach() + tilt).argmax(-1, keepdim=True))
        return x.exp().gather(-1, best)

    with usage() as report, pytest.warns(VerifyWarning):
        remat(layer, label="layer", verify="warn")(X).sum().backward()
    assert row(report, "layer").flips >= 1


def test_out_of_memory_tells_which_layers_hold_what() -> None:
    with pytest.raises(torch.OutOfMemoryError) as error, usage():
        y = remat(router, label="gate")(X)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    [note] = error.value.__notes__
    assert note.splitlines()[0] == "Held by checkpointed layers:"
    assert note.splitlines()[2].split() == ["gate", "1", "1", "512", "B", "128", "B", "0", "B", "0", "B", "1", "0"]
    assert note.splitlines()[-1] == "held now: 640 B, at most: 640 B"
    del y
    with pytest.raises(KeyError) as other, usage():
        raise KeyError
    assert not hasattr(other.value, "__notes__")


def test_json_and_html() -> None:
    with usage() as report:
        y = remat(router, label="<gate>")(X)
    told = json.loads(report.to_json())
    assert told["bytes"] == told["peak"] == 640
    assert told["layers"][0]["slot"] == 128

    class Cells(html.parser.HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_data(self, data: str) -> None:
            self.found.append(data)

    reader = Cells()
    reader.feed(report.to_html())
    assert "<gate>" in reader.found
    assert "128 B" in reader.found
    del y


def test_threads_and_blocks_within_blocks() -> None:
    gate = remat(router, label="gate")
    kept: list[torch.Tensor] = []
    with usage() as outer:
        workers = [threading.Thread(target=lambda: kept.append(gate(X))) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        with usage() as inner:
            kept.append(gate(X))
    kept.append(gate(X))
    assert (row(outer, "gate").calls, row(inner, "gate").calls) == (5, 1)


def test_nothing_is_held_by_the_report() -> None:
    with usage() as report:
        for _ in range(50):
            remat(router, label="gate")(X)
    assert (row(report, "gate").calls, row(report, "gate").alive, report.bytes) == (50, 0, 0)
    assert not report._graphs
