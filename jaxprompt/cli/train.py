"""Trains a prompt; the same command resumes an interrupted run."""

from collections.abc import Sequence

from jaxprompt.cli.options import Parser, choose_mesh, join_processes, read_training_flags
from jaxprompt.cli.results import train_grid
from jaxprompt.cli.show import print_result


def main(argv: Sequence[str]) -> int:
    """Trains, then scores the test split once. Exit code 0. A grid prints a table of its runs."""
    args, config = read_training_flags(Parser(__name__, __doc__, fields=True), argv)
    from jaxprompt.build.examples import hold_out_dev  # here: a bad flag is answered at once
    from jaxprompt.runs import multitask
    from jaxprompt.runs.grid.expand import is_grid
    from jaxprompt.runs.train import train_prompt

    with join_processes(args) as is_first:
        config = choose_mesh(hold_out_dev(config, args.set_fields))
        is_shared = multitask.is_shared(config)
        if is_grid(config) and not is_shared:
            return train_grid(config, args.workdir)
        train = multitask.train_shared_prompt if is_shared else train_prompt
        result = train(config, args.workdir)
        if result is not None and is_first:
            print_result(result, args.workdir, args.json)
    return 0
