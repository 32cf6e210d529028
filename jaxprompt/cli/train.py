"""Trains a prompt; the same command resumes an interrupted run."""

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
    """Trains, then scores the test split once. Exit code 0. A grid prints a table of its runs."""
    parser = Parser(__name__, __doc__, fields=True)
    add_process_flags(parser)
    add_profile_flag(parser)
    args, overrides = parser.read(argv)
    overrides += profile_override(args)
    require_flags(args, "config", "workdir")
    config = load_config(args.config, overrides)
    from jaxprompt.runs import multitask as shared_tuning  # here: a bad flag is answered at once
    from jaxprompt.runs import train as tune
    from jaxprompt.runs.grid.expand import is_grid

    with join_processes(args) as is_first:
        is_shared = shared_tuning.is_shared(config)
        if is_grid(config) and not is_shared:
            return train_grid(config, args.workdir)
        train = shared_tuning.train_shared_prompt if is_shared else tune.train_prompt
        result = train(config, args.workdir)
        if result is not None and is_first:
            print(dumps(result.to_json()))
    return 0
