"""Change one expression or statement of a file at a time, and see whether its tests notice.

    python tools/mutants.py roundpipe_core/_slots.py --number 40 -- tests/core/test_slots.py tests/conformance
    python tools/mutants.py roundpipe_torch/_keep.py --seed 7 -- tests/on_torch/test_keep.py -k "not flops"

Works in a copy of the commit, not in the working tree. What stands behind -- goes to pytest. Prints each mutant that no
test has killed, as a line to look at: it is equivalent, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
OTHER: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip


class Mutant(NamedTuple):
    """A piece of the source, and what stands in its place."""

    begin: int
    end: int
    line: int
    before: str
    after: str


def negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes for `node`."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield ast.Compare(node.left, [OTHER[type(op)]()], node.comparators)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(OTHER[type(op)](), node.values)
        case ast.BinOp(op=op) if type(op) in OTHER:
            yield ast.BinOp(node.left, OTHER[type(op)](), node.right)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(number)):
            yield ast.Constant(number + 1)
        case ast.IfExp():
            yield ast.IfExp(negated(node.test), node.body, node.orelse)
        case ast.Call(args=args, keywords=keywords):
            for n in range(len(args)):
                yield ast.Call(node.func, args[:n] + args[n + 1 :], keywords)
            for n in range(len(keywords)):
                yield ast.Call(node.func, args, keywords[:n] + keywords[n + 1 :])
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield ast.Pass()
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Assign(value=value) if not isinstance(value, ast.Constant):
            yield ast.Assign(node.targets, ast.Constant(None), lineno=0)


def mutants(source: str) -> list[Mutant]:
    """All of `source`, in functions: what a module does when it is imported is seen by every test."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text.encode()))
    whole = source.encode()
    found: dict[tuple[int, int, str], Mutant] = {}

    def at(node: Any, instead: ast.AST) -> None:
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        after = ast.unparse(ast.fix_missing_locations(copy.deepcopy(instead)))
        if isinstance(node, ast.expr):
            after = f"({after})"
        found[begin, end, after] = Mutant(begin, end, node.lineno, whole[begin:end].decode(), after)

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.JoinedStr):  # a message is told by its test as a whole
                    continue
                if isinstance(node, (ast.If, ast.While)):
                    at(node.test, negated(node.test))
                for instead in changes(node):
                    at(node, instead)
    return [found[key] for key in sorted(found)]


def survives(folder: Path, tests: list[str], limit: float | None) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", *tests]
    try:
        return not subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            timeout=limit,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--number", type=int, default=20, help="how many are drawn (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("tests", nargs="+", help="arguments of pytest, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        path = folder / options.file
        source = path.read_bytes()
        start = time.monotonic()
        if not survives(folder, options.tests, None):
            sys.exit("The tests fail as they are.")
        limit = 30 + 5 * (time.monotonic() - start)
        every = mutants(source.decode())
        drawn = random.Random(options.seed).sample(every, min(options.number, len(every)))
        left = 0
        for one in drawn:
            path.write_bytes(source[: one.begin] + one.after.encode() + source[one.end :])
            if survives(folder, options.tests, limit):
                left += 1
                print(f"{options.file}:{one.line}: {' '.join(one.before.split())}  ->  {one.after}", flush=True)
        print(f"{len(drawn) - left} of {len(drawn)} were killed, drawn from {len(every)}.")


if __name__ == "__main__":
    main()
