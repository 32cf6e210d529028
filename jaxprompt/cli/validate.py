"""Checks a config with its data and its backbone, and trains nothing."""

from collections.abc import Sequence

from jaxprompt.cli.options import UNREAD, Parser, need
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError, escape


def main(argv: Sequence[str]) -> int:
    """Prints what a run would learn from, and what would train. Exit code 0."""
    parser = Parser(__name__, __doc__, fields=True, workdir=UNREAD)
    args, overrides = parser.read(argv)
    need(args, "config")
    config = load_config(args.config, overrides)
    if config.ppt.task:
        raise InputError(
            "validate is for tuning, and ppt.task pre-trains a prompt; `plan` checks such a config "
            "without its corpus"
        )
    from jaxprompt.runs.validate import validate

    for line in validate(config):
        print(escape(line))
    print("the config is valid")
    return 0
