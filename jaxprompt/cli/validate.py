"""Checks a config, its data and its backbone without training."""

from collections.abc import Sequence

from jaxprompt.cli import print_text
from jaxprompt.cli.options import UNUSED, Parser, choose_mesh, require_flags
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError


def main(argv: Sequence[str]) -> int:
    """Prints the data and the trainable parameters of a run. Exit code 0."""
    parser = Parser(__name__, __doc__, fields=True, workdir=UNUSED)
    args, overrides = parser.read(argv)
    require_flags(args, "config")
    config = load_config(args.config, overrides)
    if config.ppt.task:
        raise InputError(
            "validate does not support ppt.task, which pre-trains a prompt; use `plan`, which "
            "checks such a config without its corpus"
        )
    from jaxprompt.build.examples import hold_out_dev
    from jaxprompt.runs.validate import validate

    config = hold_out_dev(config, {field for field, _ in overrides})
    for line in validate(choose_mesh(config)):
        print_text(line)
    print_text("the config is valid")
    return 0
