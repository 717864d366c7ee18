#!/usr/bin/env python3
"""Train a small mixture-of-experts language model in several ways, and see which of them train the same model.

    none     without checkpointing: the oracle
    torch    torch.utils.checkpoint, around layers that save nothing
    jax      jax.checkpoint
    ours     remat of roundpipe_torch and roundpipe_jax: the recompute takes the routing that the forward saved
    verify   the same in PyTorch with verify="warn", which also says what a plain recompute would route differently

All start from the same weights, see the same text and, in a framework, draw the same random numbers. At last both
frameworks train side by side: JAX once deciding itself, and once replaying the tape that PyTorch records in each step.
Prints a table for each part and writes a report.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _moe_report as report
from _moe_results import Results, SideBySide
from _moe_settings import ORACLE, WAYS, DivergedError, Settings
from _moe_text import VOCABULARY, Text, batches, read_text
from _moe_weights import Sizes
from rich.console import Console
from tqdm import tqdm

import roundpipe_core

if TYPE_CHECKING:  # a framework is imported only if it is used
    from _moe_jax_training import Training
    from _moe_training import Trainee

EVALUATED = 8  # batches of held-out text
FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: ours did as it should; 1: it did not; 2: a wrong option."""
    parser = command_line()
    options = parser.parse_args(arguments)
    check(parser, options)

    text = read_text()
    if min(len(text.train), len(text.held_out)) <= options.length + 1:
        parser.error(f"the standard library's sources ({len(text)} bytes) are too short for --length {options.length}")
    try:
        found = train(text, options)
    except KeyboardInterrupt:
        print("\nStopped. No report was written.", file=sys.stderr)
        return 130
    except DivergedError as error:
        parser.error(f"{error}; try a smaller --learning-rate than {options.learning_rate:g}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    report.print_tables(found, console)
    for path in report.write(found, options.out):
        console.print(f"  {path}", style="dim", highlight=False, soft_wrap=True)
    return 0 if found.passed() else 1


def train(text: Text, options: argparse.Namespace) -> Results:
    """Train in the frameworks, one after the other."""
    sizes = Sizes(
        layers=options.layers,
        D=options.dim,
        E=options.experts,
        K=options.top_k,
        L=options.length,
        V=VOCABULARY,
        heads=options.heads,
        dropout=options.dropout,
        bias_rate=options.bias_rate,
    )
    settings = Settings(options.steps, options.learning_rate, options.precision, options.seed)
    held_out = list(batches(text.held_out, options.batch, options.length, count=EVALUATED, seed=options.seed))
    found = Results(
        ways=[],
        jax=None,
        side=None,
        options={name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        text={"files": text.files, "bytes": len(text), "sha256": text.digest},
        machine={
            "python": platform.python_version(),
            "roundpipe": roundpipe_core.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "threads": options.threads,
        },
        tokens=options.batch * options.length,
        parameters=0,
    )
    if "torch" in options.frameworks:
        from _moe_torch_results import torch_machine, torch_ways

        trained = train_in_torch(text, held_out, sizes, settings, options)
        found.ways = torch_ways(trained, found.tokens)
        found.machine |= torch_machine()
        found.parameters = sum(parameter.numel() for parameter in trained[0].model.parameters())
    if "jax" in options.frameworks:
        shared = train_in_jax(text, held_out, sizes, settings, options)
        import jax
        from _moe_jax_results import jax_results

        found.jax = jax_results(shared)
        found.machine["jax"] = jax.__version__
        found.parameters = found.jax.parameters
    if found.ways and found.jax and "ours" in options.ways and options.side_steps:
        found.side = train_side_by_side(text, sizes, settings, options)
    return found


def train_in_torch(
    text: Text, held_out: list[Any], sizes: Sizes, settings: Settings, options: argparse.Namespace
) -> list[Trainee]:
    """All ways, trained."""
    import _moe_training as in_torch
    import torch

    torch.set_num_threads(options.threads)
    if options.precision == "bfloat16" and not _bfloat16_is_fast():
        print("This CPU computes bfloat16 slowly; --precision float32 is faster here.", file=sys.stderr)
    trained = in_torch.trainees([way for way in options.ways if way in in_torch.WAYS], sizes, settings)
    data = batches(text.train, options.batch, options.length, count=options.steps, seed=options.seed)
    for n, batch in enumerate(progress(data, options.steps, "training in PyTorch")):
        for trainee in in_turn(trained, n):
            in_torch.train_step(trainee, batch, settings)
    for trainee in trained:
        trainee.held_out_loss = in_torch.evaluate(trainee, held_out, settings)
    return trained


def train_in_jax(
    text: Text, held_out: list[Any], sizes: Sizes, settings: Settings, options: argparse.Namespace
) -> Training:
    """All ways, trained."""
    if "jax" not in sys.modules:  # read only once, by the import
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if options.threads == 1:
            os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    import _moe_jax as model
    import _moe_jax_training as in_jax

    print("JAX: compiling", file=sys.stderr, flush=True)
    start = time.perf_counter()
    shared = in_jax.training([way for way in options.ways if way in model.WAYS], sizes, settings, options.batch)
    steps = min(options.steps, options.jax_steps)
    data = batches(text.train, options.batch, options.length, count=steps, seed=options.seed)
    for n, batch in enumerate(progress(data, steps, "training in JAX")):
        for trainee in in_turn(shared.trainees, n):
            in_jax.train_step(shared, trainee, batch)
    for trainee in shared.trainees:
        trainee.held_out_loss = in_jax.evaluate(shared, trainee, held_out)
    shared.seconds = time.perf_counter() - start
    return shared


def train_side_by_side(text: Text, sizes: Sizes, settings: Settings, options: argparse.Namespace) -> SideBySide:
    """PyTorch, and JAX twice beside it, with nothing but rounding between them."""
    from _moe_side_by_side import SideTraining

    together = SideTraining(replace(sizes, dropout=0.0), settings._replace(precision="float32"), options.out)
    steps = min(options.steps, options.side_steps)
    data = batches(text.train, options.batch, options.length, count=steps, seed=options.seed)
    for batch in progress(data, steps, "training side by side"):
        together.step(batch)
    return together.results()


def in_turn(trainees: list[Any], step: int) -> list[Any]:
    """Nobody is always first, or always after the slowest: their times are compared in pairs."""
    first = step % len(trainees)
    return trainees[first:] + trainees[:first]


def progress(data: Iterator[Any], total: int, what: str) -> Iterator[Any]:
    """A progress bar on a terminal; elsewhere (a log, a pipe) a line every tenth of the way."""
    bar = tqdm(data, desc=what, total=total, unit="step", disable=None, dynamic_ncols=True)
    if not bar.disable:
        yield from bar
        return
    for n, batch in enumerate(data, 1):
        yield batch
        if n % max(1, total // 10) == 0 or n == total:
            print(f"{what}: {n} of {total} steps", file=sys.stderr, flush=True)


# The command line


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 if ours followed the oracle bit for bit in PyTorch, and in JAX kept the experts of "
        "every token and had the gradient of pinned routing bit for bit, and JAX routed as PyTorch's tapes say; 1 if "
        "not; 2 for a wrong option.",
    )
    say = parser.add_argument_group("what to train").add_argument
    say(
        "--steps",
        type=whole(1),
        default=280,
        metavar="N",
        help="training steps for each way (default: %(default)s)",
    )
    say(
        "--jax-steps",
        type=whole(1),
        default=40,
        metavar="N",
        help="at most so many of them in JAX, which also has to compile (default: %(default)s)",
    )
    say(
        "--side-steps",
        type=whole(0),
        default=120,
        metavar="N",
        help="at most so many of them in JAX beside PyTorch, if both are there (default: %(default)s)",
    )
    say("--layers", type=whole(1), default=4, metavar="N", help="blocks (default: %(default)s)")
    say("--dim", type=whole(1), default=96, metavar="N", help="width of a token (default: %(default)s)")
    say("--heads", type=whole(1), default=4, metavar="N", help="attention heads (default: %(default)s)")
    say(
        "--experts",
        type=whole(1),
        default=16,
        metavar="N",
        help="experts in each block (default: %(default)s)",
    )
    say("--top-k", type=whole(1), default=2, metavar="K", help="experts for each token (default: %(default)s)")
    say("--batch", type=whole(1), default=8, metavar="N", help="sequences in a batch (default: %(default)s)")
    say("--length", type=whole(1), default=96, metavar="N", help="bytes in a sequence (default: %(default)s)")
    say(
        "--dropout",
        type=number(0, 1),
        default=0.1,
        metavar="P",
        help="of what a block adds (default: %(default)s)",
    )
    say("--learning-rate", type=number(0), default=3e-3, metavar="R", help="of AdamW (default: %(default)s)")
    say(
        "--bias-rate",
        type=number(0),
        default=1e-3,
        metavar="R",
        help="by how much each forward moves the bias of an expert (default: %(default)s, as in DeepSeek-V3)",
    )
    say = parser.add_argument_group("how").add_argument
    say(
        "--frameworks",
        type=frameworks,
        default=None,
        metavar="A,B",
        help=f"of {','.join(FRAMEWORKS)} (default: those that are installed)",
    )
    say(
        "--ways",
        type=ways,
        default=list(WAYS),
        metavar="A,B,...",
        help=f"of {','.join(WAYS)} (default: all, each where it exists); {ORACLE} is always run, since the others are "
        "compared with it",
    )
    say(
        "--precision",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of autocast (default: %(default)s)",
    )
    say(
        "--threads",
        type=whole(1),
        default=1,
        metavar="N",
        help="compute threads (default: %(default)s; more are faster where all these cores are idle)",
    )
    say(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="of weights, text and dropout (default: %(default)s)",
    )
    say(
        "--out",
        type=Path,
        default=Path("build/demo"),
        metavar="DIR",
        help="for the report (default: %(default)s)",
    )
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What no single option can tell."""
    installed = [name for name in FRAMEWORKS if find_spec(name)]
    for name in options.frameworks or []:
        if name not in installed:
            parser.error(f"--frameworks {name}: {missing(name)}")
    if not installed:
        parser.error("neither PyTorch nor JAX is installed: pip install 'roundpipe-recompute[all]'")
    if options.frameworks is None:
        options.frameworks = installed
        for name in FRAMEWORKS.keys() - set(installed):
            print(f"{missing(name)}. Its part is left out.", file=sys.stderr)
    if options.top_k > options.experts:
        parser.error(f"--top-k {options.top_k} is more than --experts {options.experts}")
    if options.dim % options.heads:
        parser.error(f"--dim {options.dim} is not a multiple of --heads {options.heads}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror or error}")
    if not os.access(options.out, os.W_OK):
        parser.error(f"--out {options.out}: not writable")


def whole(least: int) -> Callable[[str], int]:
    """A whole number, `least` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return parse


def number(least: float, below: float = float("inf")) -> Callable[[str], float]:
    """A number from `least` to `below`, which is not included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not in the range from {least} to below {below}")
        return value

    return parse


def ways(text: str) -> list[str]:
    """Names of ways, in the order of the table, the oracle always among them."""
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in WAYS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(WAYS)}")
    if not named:
        raise argparse.ArgumentTypeError(f"name at least one of {', '.join(WAYS)}")
    return [name for name in WAYS if name in {ORACLE, *named}]


def frameworks(text: str) -> list[str]:
    """Names of frameworks, in the order of the report."""
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in FRAMEWORKS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(FRAMEWORKS)}")
    if not named:
        raise argparse.ArgumentTypeError(f"name at least one of {', '.join(FRAMEWORKS)}")
    return [name for name in FRAMEWORKS if name in named]


def missing(name: str) -> str:
    return f"{FRAMEWORKS[name]} is not installed: pip install 'roundpipe-recompute[{name}]'"


def _bfloat16_is_fast() -> bool:
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return True


if __name__ == "__main__":
    sys.exit(main())
