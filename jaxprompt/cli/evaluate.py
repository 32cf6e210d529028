"""Scores a split with the best prompt of a workdir, or zero-shot."""

import json
from collections.abc import Sequence

from jaxprompt.cli.options import Parser, load_config, need
from jaxprompt.errors import InputError


def main(argv: Sequence[str]) -> int:
    """Prints the metrics of a split as JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--split", default="dev", help="train, dev or test (default: dev)")
    args, overrides = parser.read(argv)
    need(args, "config")
    c = load_config(args.config, overrides)

    from jaxprompt import build

    if args.split not in build.SPLITS:
        raise InputError(f"--split={args.split!r} is unknown; known: {', '.join(build.SPLITS)}")
    if not build.is_zero_shot(c):
        need(args, "workdir")
    trained = build.restore(c, args.workdir, [args.split])
    if args.split not in trained.splits:
        raise InputError(f"task {c.task.name} has no {args.split} split here; give data.files")
    scorer, part = trained.scorer, trained.splits[args.split]
    measure = build.build_measure(c, scorer, trained.placement)
    measured = measure(part, trained.weights.trainable, trained.weights.frozen)
    print(json.dumps({"split": args.split, "examples": len(part.labels), **measured}))
    return 0
