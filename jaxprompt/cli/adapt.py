"""Continues pre-training a backbone on a corpus; the same command resumes an interrupted run."""

from collections.abc import Sequence

from jaxprompt.cli.options import Parser, join_processes, read_training_flags
from jaxprompt.cli.show import print_result
from jaxprompt.files import dumps


def main(argv: Sequence[str]) -> int:
    """Trains, prints the scores on held-out text, and writes the backbone."""
    parser = Parser(__name__, __doc__, fields=True)
    parser.add_argument(
        "--score", action="store_true", help="only score the current weights on held-out text"
    )
    args, config = read_training_flags(parser, argv)
    from jaxprompt.runs import adapt  # only here, so that a bad flag is answered at once

    with join_processes(args) as is_first:
        if args.score:
            scores = adapt.score_held_out(config, args.workdir)
            if is_first:
                print(dumps(scores))
            return 0
        result = adapt.adapt_backbone(config, args.workdir)
        if result is not None and is_first:
            print_result(result, args.workdir, args.json)
    return 0
