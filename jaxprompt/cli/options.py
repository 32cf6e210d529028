"""Flags that several commands share, and their errors. Imports nothing heavy."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from jaxprompt.cli.results import check_single
from jaxprompt.config.load import load_config
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, brief
from jaxprompt.files import user_path

UNUSED = "accepted, so that a `train` command can be reused, but not used"
SPLITS = ("train", "dev", "test")


def path(text: str) -> str:
    """Returns the path that a flag names. For argparse, as the type of a flag."""
    if not text:  # e.g. an unset variable of the shell; a system call would read "" as "."
        raise argparse.ArgumentTypeError("the value is empty")
    expanded = user_path(text)
    # A shell does not expand the ~ of --workdir=~/runs.
    return str(expanded) if text.startswith("~") else text


class _Help(argparse.Action):
    """Prints the help of a command, or the config fields of a block, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        """Prints the fields of the block `values`; the help of the command if it is None."""
        if values is None:
            parser.print_help()
        else:
            from jaxprompt.config.reference import list_fields

            print(list_fields(str(values)))
        parser.exit()


def whole(text: str) -> int:
    """Returns the whole number of a flag, as large as one of a config field may be."""
    try:
        value = int(text)
    except ValueError:  # also for over 4,300 digits
        value = 2**31
    if abs(value) >= 2**31:
        raise argparse.ArgumentTypeError(f"{brief(text)} must be a whole number below 2**31")
    return value


class Parser(argparse.ArgumentParser):
    """The argument parser of a command. Errors of argparse are raised as InputError."""

    def __init__(
        self,
        name: str,
        doc: str,
        config: bool = True,
        fields: bool = False,
        workdir: str = "folder of the run",
    ):
        """Adds --debug, and --config and --workdir for commands that take them.

        Args:
          name: name of the command or of its module.
          doc: description of the command.
          config: whether the command takes --config and --workdir.
          fields: whether --help also lists the blocks of the config, and --help=BLOCK their fields.
          workdir: help of --workdir.
        """
        self._fields = fields
        self.takes_overrides = config
        super().__init__(
            prog=f"jaxprompt {name.rpartition('.')[2]}".rstrip(),
            description=doc,
            allow_abbrev=False,
            add_help=not fields,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if fields:
            self.add_argument(
                "-h",
                "--help",
                action=_Help,
                nargs="?",
                metavar="BLOCK",
                help="show this help, or the config fields of a block, e.g. --help=optim",
            )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if config:
            self.add_argument(
                "--config",
                type=path,
                help="a .py file or a shipped config (base, ppt/nsp), optionally with :ARGUMENT, "
                "or a saved config.json; override fields with --config.FIELD=VALUE",
            )
            self.add_argument("--workdir", type=path, help=workdir)

    def error(self, message: str) -> NoReturn:
        """Raises InputError instead of exiting."""
        if self.takes_overrides and message.startswith("unrecognized"):
            message += "; set a field of the config with --config.FIELD=VALUE"
        raise InputError(f"{message}; see --help")

    def format_help(self) -> str:
        """Returns the help: the flags, then the blocks of the config."""
        if not self._fields:
            return super().format_help()
        from jaxprompt.config.reference import list_blocks

        return f"{super().format_help()}\n{list_blocks()}\n"

    def read(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
        """Parses the flags. Returns them, and the overrides (field, value) of the config."""
        # By hand: which fields there are depends on the config, which argparse has not read.
        plain, overrides = [], []
        words = iter(argv)
        for word in words:
            if not word.startswith("--config."):
                plain.append(word)
                continue
            value: str | None
            field, equals, value = word.removeprefix("--config.").partition("=")
            if not equals:
                value = next(words, None)
            if value is None:
                raise InputError(f"{word} has no value; write {word}=VALUE")
            overrides.append((field, value))
        args = self.parse_args(plain)
        if overrides and not self.takes_overrides:
            raise InputError(f"{self.prog} takes no --config.{overrides[0][0]}; remove it")
        return args, overrides


def add_process_flags(parser: Parser) -> None:
    """Adds the flags of runs on several processes."""
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, for several processes")
    parser.add_argument("--processes", type=whole, help="number of processes")
    parser.add_argument("--process", type=whole, help="index of this process, from 0")
    parser.add_argument(
        "--cluster", action="store_true", help="detect the processes on Slurm or a TPU pod"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds to wait for the other processes (default: 300)",
    )


def read_training_flags(
    parser: Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, RunConfig]:
    """Parses the flags of a command that trains. Returns them, and the config.

    The flags contain the fields that the user set, as `set_fields`.
    """
    add_process_flags(parser)
    parser.add_argument(
        "--profile", metavar="STEPS", help="write a trace of STEPS steps to WORKDIR/profile"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as one line of JSON also in a terminal, as to a file or pipe",
    )
    args, overrides = parser.read(argv)
    if args.profile is not None:
        overrides.append(("train.profile", args.profile))
    require_flags(args, "config", "workdir")
    args.set_fields = {field for field, _ in overrides}
    return args, load_config(args.config, overrides)


@contextlib.contextmanager
def join_processes(args: argparse.Namespace) -> Iterator[bool]:
    """Joins the other processes. Yields whether this process writes and prints."""
    from jaxprompt.parallel import processes

    with processes.exit_on_failure():
        processes.connect(
            args.coordinator,
            args.processes,
            args.process,
            cluster=args.cluster,
            timeout=args.timeout,
        )
        yield processes.is_first()


def choose_mesh(config: RunConfig) -> RunConfig:
    """Returns a config whose mesh.model=0 is replaced by the smallest that fits, and logs it."""
    if config.mesh.model:
        return config
    from jaxprompt.planning.model_axis import with_model_axis

    return with_model_axis(config, _log_once)


def _log_once(line: str) -> None:
    """Prints a line to stderr, of several processes in the first one."""
    from jaxprompt.cli import log
    from jaxprompt.parallel import processes

    if processes.is_first():
        log(line)


def require_flags(args: argparse.Namespace, *names: str) -> None:
    """Raises InputError for the first flag of `names` that is missing or empty."""
    for name in names:
        if not getattr(args, name):
            raise InputError(f"--{name} is missing; see --help")


def load_run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Loads --config, or by default the config.json of --workdir.

    Raises:
      InputError: if the workdir contains no run or several runs.
    """
    if args.workdir is None:
        require_flags(args, "config")
        return load_config(args.config, overrides)
    check_single(args.workdir)
    saved = Path(args.workdir) / "config.json"
    if args.config is None and not saved.is_file():
        raise InputError(f"{saved} does not exist; give the --workdir of a run, or --config")
    config = load_config(args.config or str(saved), overrides)
    if args.config is not None and getattr(args, "split", "test") != "test":
        from jaxprompt.build.examples import hold_out_dev

        config = hold_out_dev(config, {field for field, _ in overrides})
    return config
