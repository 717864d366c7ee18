#!/usr/bin/env python3
"""Train a small mixture-of-experts language model four ways, and see which of them train the same model.

    none     without checkpointing: the oracle
    torch    torch.utils.checkpoint
    ours     roundpipe_torch.remat: the recompute takes the routing that the forward saved
    verify   the same with verify="warn", which also says what a plain recompute would have routed otherwise

All start from the same weights, see the same text and draw the same random numbers. Prints a table and writes a report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _moe_report as report
import torch
from _moe_results import results
from _moe_text import VOCABULARY, Text, batches, read_text
from _moe_training import ORACLE, WAYS, DivergedError, Settings, Trainee, evaluate, train_step, trainees
from _moe_weights import Sizes
from rich.console import Console
from tqdm import tqdm

EVALUATED = 8  # batches of held-out text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: ours followed the oracle bit for bit; 1: it did not; 2: a wrong option."""
    parser = command_line()
    options = parser.parse_args(arguments)
    check(parser, options)
    torch.set_num_threads(options.threads)
    if options.precision == "bfloat16" and not _bfloat16_is_fast():
        print("This CPU computes bfloat16 slowly; --precision float32 is faster here.", file=sys.stderr)

    text = read_text()
    if min(len(text.train), len(text.held_out)) <= options.length + 1:
        parser.error(f"the standard library's sources ({len(text)} bytes) are too short for --length {options.length}")
    try:
        trained = train(text, options)
    except KeyboardInterrupt:
        print("\nStopped. Nothing was written.", file=sys.stderr)
        return 130
    except DivergedError as error:
        parser.error(f"{error}; try a smaller --learning-rate than {options.learning_rate:g}")
    found = results(trained, text, vars(options))
    console = Console(width=None if sys.stdout.isatty() else 120)
    report.print_table(found, console)
    for path in report.write(found, options.out):
        console.print(f"  {path}", style="dim", highlight=False, soft_wrap=True)
    return 0 if found.followed() else 1


def train(text: Text, options: argparse.Namespace) -> list[Trainee]:
    """Train in all ways, in turn within each step, so that their times can be compared in pairs."""
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
    settings = Settings(options.steps, options.learning_rate, getattr(torch, options.precision), options.seed)
    trained = trainees(options.ways, sizes, settings)
    shape = options.batch, options.length
    data = batches(text.train, *shape, count=options.steps, seed=options.seed)
    for n, batch in enumerate(progress(data, options.steps)):
        first = n % len(trained)
        for trainee in trained[first:] + trained[:first]:  # nobody is always first, or always after the slowest
            train_step(trainee, batch, settings)
    held_out = list(batches(text.held_out, *shape, count=EVALUATED, seed=options.seed))
    for trainee in trained:
        evaluate(trainee, held_out, settings)
    return trained


def progress(data: Iterator[Any], total: int) -> Iterator[Any]:
    """A progress bar on a terminal; elsewhere (a log, a pipe) a line every tenth of the way."""
    bar = tqdm(data, desc="training", total=total, unit="step", disable=None, dynamic_ncols=True)
    if not bar.disable:
        yield from bar
        return
    for n, batch in enumerate(data, 1):
        yield batch
        if n % max(1, total // 10) == 0 or n == total:
            print(f"training: {n} of {total} steps", file=sys.stderr, flush=True)


# The command line


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 if ours followed the oracle bit for bit, 1 if not, 2 for a wrong option.",
    )
    say = parser.add_argument_group("what to train").add_argument
    say(
        "--steps",
        type=whole(1),
        default=280,
        metavar="N",
        help="training steps for each way (default: %(default)s)",
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
        "--ways",
        type=ways,
        default=list(WAYS),
        metavar="A,B,...",
        help=f"of {','.join(WAYS)} (default: all); {ORACLE} is always run, since the others are compared with it",
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


def _bfloat16_is_fast() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return True


if __name__ == "__main__":
    sys.exit(main())
