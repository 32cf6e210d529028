"""Hostile values, and the judge of what may come of them: success, or exit code 2 with one line.

Everything is drawn from a seed, so that an input which fails can be made again.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxprompt.__main__ import main
from jaxprompt.cli import evaluate

SEED = 16


def nested(levels: int) -> list:
    """Makes a list of lists, `levels` deep."""
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


# What a shell may hand over.
TEXTS = [
    "", " ", "None", "nan", "-inf", "1e999", "9" * 400, "1" * 5000, "-1", "0", "1", "2147483648",
    "1e308", "1e-320", "True", "[]", "()", "(" * 300, "[" * 3000, "-" * 3000 + "1", "a\0b",
    "x" * 300, "é" * 200, "~nouser-of-this-name/x", "////", "\x1b[2J\r\u202e\x9b", "{", "}", "{}",
    "{0.x}{y}", "[mask][mask]", "[soft*99999999999]", "[soft*" + "9" * 5000 + "]",
    "{text|chop|lower}", "{text} [cls] [mask]", "a|b,,|", "\\", "%s%n", "hub:x/y", "tfds:",
    "pkg:..", "pkg:os/..", "__class__", "1_000", "0x10", "1,2,3", "('a',)", "'", "lambda: 0",
    "[1,[2]]", "((1,2),3)", "99999999999-1", "2-1", "1-2147483648", "(?P<x>a)(?P<x>b)",
    "a{99999999999}", "(" * 99 + ")" * 99, "-0.0", "text", "3", "4", "0.5", "b" * 10**5, "\ud800",
    "1e5", "custom", "{text} [mask].", "\n\n",
]  # fmt: skip
# What a JSON file may hold.
VALUES = [
    None, True, False, 0, -1, 1, 3, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400), 1e308, -1e39,
    1e-320, -0.0,
    float("nan"), float("inf"), "", " ", "x", "a\0b", "x" * 300, "~nouser-of-this-name",
    "\x1b[31m\r", "\ud800", "9" * 500, "{text} [mask]", "{", "[soft*3]", [], [[]], [None],
    ["a", 1], ["x"] * 3, [["a"], ["b"]], [["a"], 1], {}, {"a": 1}, {"__class__": 1, "a.b": 2},
    [{}], nested(40), nested(400), nested(3000), 0.5, "0.5", "true", "gelu",
]  # fmt: skip


def dump(value: Any) -> str:
    """Writes JSON of any depth, with NaN."""
    return json.dumps(value) if depth(value) < 400 else write_deep(value)


def depth(value: Any) -> int:
    """Counts the levels of what holds its parts in one place, as `nested` does."""
    levels, level = 0, [value]
    while level := [p for x in level for p in parts(x)]:
        levels += 1
    return levels


def parts(value: Any) -> list:
    """Lists the values in a list or an object."""
    return list(value.values()) if isinstance(value, dict) else value if type(value) is list else []


def write_deep(value: Any) -> str:
    """Writes JSON whose depth Python's own writer refuses."""
    if isinstance(value, dict):
        items = (f"{json.dumps(name)}: {dump(part)}" for name, part in value.items())
        return "{" + ", ".join(items) + "}"
    levels = depth(value)
    return "[" * (levels + 1) + "]" * (levels + 1)


def leaves(tree: dict, prefix: tuple = ()) -> Iterator[tuple]:
    """Lists the paths of all keys of nested objects, those of objects too."""
    for name, value in tree.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, name))


def replaced(tree: dict, path: tuple, value: Any) -> dict:
    """Copies nested objects with another value at a path."""
    first, *rest = path
    return tree | {first: replaced(tree[first], tuple(rest), value) if rest else value}


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Damages bytes: some changed, cut, doubled, or something hostile put in."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(data) + 1))
        match rng.integers(0, 5):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = rng.bytes(1)
            case 2:
                data[at:at] = data[at : at + int(rng.integers(1, 60))]
            case 3:
                data[at : at + int(rng.integers(1, 9))] = b""
            case _:
                parts = [
                    b"\0",
                    b"\xff",
                    b"\xed\xa0\x80",
                    b'"',
                    b"\n",
                    b"\r",
                    b"[" * 2000,
                    b"9" * 400,
                ]
                parts += [
                    b"{",
                    b"}",
                    b",",
                    b"\t",
                    b"\\ud800",
                    b"\xef\xbb\xbf",
                    b"-",
                    b"NaN",
                    b"null",
                ]
                data[at:at] = parts[int(rng.integers(0, len(parts)))]
    return bytes(data)


def survive(monkeypatch: Any, inputs: Any, action: Callable, *args: Any) -> int:
    """Runs an action as a command. -> exit code; fails with what was `given`."""

    def command(_argv: list[str]) -> int:
        action(*args)
        return 0

    monkeypatch.setattr(evaluate, "main", command)
    return judge(inputs, ["evaluate"])


def judge(inputs: Any, argv: list[str]) -> int:
    """Runs a command. -> exit code: 0, or 2 with one line; else fails, with what was `given`."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        pytest.fail(f"{type(error).__name__}: {error!s:.300}\ngiven: {show(inputs)}")
    message = err.getvalue()
    one_line = (
        message.endswith("\n") and len(message.splitlines()) == 1 and message[:-1].isprintable()
    )
    refused = code == 2 and one_line and not out.getvalue()
    if not refused and (code, message) != (0, ""):
        pytest.fail(f"exit {code}, said {message!r:.1000}\ngiven: {show(inputs)}")
    return code


def show(inputs: Any) -> str:
    """Writes what was given, so that it can be given again; of what is too deep its kind."""
    if isinstance(inputs, tuple):
        return f"({', '.join(map(show, inputs))})"
    return repr(inputs)[:3000] if depth(inputs) < 100 else f"nested({depth(inputs) - 1})"


def sample(rng: np.random.Generator, *choices: list, count: int) -> Iterator[tuple]:
    """Draws from the product of lists, every member of the first at least once where it can."""
    order = rng.permutation(len(choices[0]))
    for i in range(count):
        first = choices[0][order[i % len(order)]]
        yield first, *(values[int(rng.integers(0, len(values)))] for values in choices[1:])


def write(path: Path, data: bytes | str) -> Path:
    """Writes a file."""
    path.write_bytes(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
    return path
