"""Scores a split with the best prompt of a workdir, or zero-shot."""

import sys
from collections.abc import Sequence
from typing import Any

from jaxprompt.cli.options import Parser, add_hosts, load_config, need, several_hosts
from jaxprompt.errors import InputError
from jaxprompt.runlog import dumps


def main(argv: Sequence[str]) -> int:
    """Prints the metrics of a split as JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--split", default="dev", help="train, dev or test (default: dev)")
    add_hosts(parser)
    args, overrides = parser.read(argv)
    need(args, "config")
    c = load_config(args.config, overrides)
    with several_hosts(args) as is_first:
        measured = evaluate(c, args.workdir, args.split)
        if is_first:
            print(dumps(measured))
    return 0


def evaluate(c: Any, workdir: str | None, split: str) -> dict[str, Any]:
    """Scores a split. Raises InputError where it is unknown or not there."""
    from jaxprompt import build, hosts
    from jaxprompt.build.examples import SPLITS

    if split not in SPLITS:
        raise InputError(f"--split={split!r} is unknown; known: {', '.join(SPLITS)}")
    if not build.is_zero_shot(c) and workdir is None:
        raise InputError("--workdir is missing; see --help")
    trained = build.restore(c, workdir, [split])
    if split not in trained.splits:
        raise InputError(f"task {c.task.name} has no {split} split here; give data.files")
    for line in trained.others if hosts.is_first() else ():
        print(line, file=sys.stderr)
    scorer, part = trained.scorer, trained.splits[split]
    measure = build.build_measure(c, scorer, trained.placement)
    measured = measure(part, trained.weights.trainable, trained.weights.frozen)
    return {"split": split, "examples": len(part.labels), **measured}
