"""Continues pre-training a backbone on a corpus; the same command resumes an interrupted run."""

from collections.abc import Sequence

from jaxprompt.cli.options import (
    Parser,
    add_process_flags,
    add_profile_flag,
    join_processes,
    profile_override,
    require_flags,
)
from jaxprompt.config.load import load_config
from jaxprompt.files import dumps


def main(argv: Sequence[str]) -> int:
    """Trains, prints the scores on held-out text as JSON, and writes the backbone."""
    parser = Parser(__name__, __doc__, fields=True)
    add_process_flags(parser)
    add_profile_flag(parser)
    parser.add_argument(
        "--score", action="store_true", help="only score the current weights on held-out text"
    )
    args, overrides = parser.read(argv)
    overrides += profile_override(args)
    require_flags(args, "config", "workdir")
    config = load_config(args.config, overrides)
    from jaxprompt.runs import adapt  # only here, so that a bad flag is answered at once

    with join_processes(args) as is_first:
        scores: dict[str, object] | None
        if args.score:
            scores = adapt.score_held_out(config, args.workdir)
        else:
            result = adapt.adapt_backbone(config, args.workdir)
            scores = None if result is None else result.to_json()
        if scores is not None and is_first:
            print(dumps(scores))
    return 0
