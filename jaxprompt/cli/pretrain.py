"""Pre-trains a prompt for a frozen backbone, on a corpus or on texts with topics.

The same command resumes an interrupted run. Topics (head.name=topics) are for prompts that are
computed from the text.
"""

from collections.abc import Sequence

from jaxprompt.cli.grid import train_grid
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
    """Trains, and prints the scores on held-out text as JSON; `export` writes the prompt.

    A grid of runs prints a table.
    """
    parser = Parser(__name__, __doc__, fields=True)
    add_process_flags(parser)
    add_profile_flag(parser)
    args, overrides = parser.read(argv)
    overrides += profile_override(args)
    require_flags(args, "config", "workdir")
    config = load_config(args.config, overrides)
    from jaxprompt.runs import ppt  # only here, so that a bad flag is answered at once
    from jaxprompt.runs.grid.expand import is_grid

    with join_processes(args) as is_first:
        if is_grid(config):
            return train_grid(
                config, args.workdir, "train" if ppt.has_topics(config) else "pretrain"
            )
        result = ppt.pretrain_prompt(config, args.workdir)
        if result is not None and is_first:
            print(dumps(result.to_json()))
    return 0
