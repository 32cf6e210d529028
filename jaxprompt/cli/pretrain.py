"""Pre-trains a prompt for a frozen backbone, on a corpus or on texts with topics.

The same command resumes an interrupted run. Topics (head.name=topics) are for prompts that are
computed from the text.
"""

from collections.abc import Sequence

from jaxprompt.cli.options import Parser, choose_mesh, join_processes, read_training_flags
from jaxprompt.cli.results import train_grid
from jaxprompt.cli.show import print_result


def main(argv: Sequence[str]) -> int:
    """Trains, and prints the scores on held-out text; `export` writes the prompt.

    A grid of runs prints a table.
    """
    args, config = read_training_flags(Parser(__name__, __doc__, fields=True), argv)
    from jaxprompt.runs import ppt  # only here, so that a bad flag is answered at once
    from jaxprompt.runs.grid.expand import is_grid

    with join_processes(args) as is_first:
        config = choose_mesh(config)
        if is_grid(config):
            return train_grid(
                config, args.workdir, "train" if ppt.has_topics(config) else "pretrain"
            )
        result = ppt.pretrain_prompt(config, args.workdir)
        if result is not None and is_first:
            print_result(result, args.workdir, args.json)
    return 0
