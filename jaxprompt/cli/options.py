"""Flags that several commands share, and their errors. Imports nothing heavy."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from jaxprompt.cli.results import check_single
from jaxprompt.config.load import load_config
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError
from jaxprompt.files import user_path

UNUSED = "accepted, so that a `train` command can be reused, but not used"
_PATHS = (
    "config", "workdir", "output", "input", "prompt", "backbone",
    "npy", "peft", "stablehlo", "tuned",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """The argument parser of a command. Errors of argparse are raised as InputError."""

    def __init__(
        self, name: str, doc: str, config: bool = True, fields: bool = False,
        workdir: str = "folder of the run",
    ):  # fmt: skip
        """Adds --debug, and --config and --workdir for commands that take them.

        Args:
          name: name of the command or of its module.
          doc: description of the command.
          config: whether the command takes --config and --workdir.
          fields: whether --help also lists the config fields.
          workdir: help of --workdir.
        """
        self._fields = fields
        super().__init__(
            prog=f"jaxprompt {name.rpartition('.')[2]}".rstrip(), description=doc,
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if config:
            self.add_argument(
                "--config",
                help="a .py file or a shipped config (base, ppt/nsp), optionally with :ARGUMENT, "
                "or a saved config.json; override fields with --config.FIELD=VALUE",
            )
            self.add_argument("--workdir", help=workdir)

    def error(self, message: str) -> NoReturn:
        """Raises InputError instead of exiting."""
        raise InputError(f"{message}; see --help")

    def format_help(self) -> str:
        """Returns the help: the flags, then the config fields."""
        if not self._fields:
            return super().format_help()
        from jaxprompt.cli.reference import list_fields

        return f"{super().format_help()}\n{list_fields()}\n"

    def read(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
        """Parses the flags. Returns them, and the overrides (field, value) of the config."""
        # By hand: which fields there are depends on the config, which argparse has not read.
        takes_config = "--config" in self._option_string_actions
        plain, overrides, rest = [], [], list(argv)
        while rest:
            word = rest.pop(0)
            if word.partition("=")[0] == "--config" and not takes_config:
                # A command without a config says what it takes instead.
                overrides.append((word, "" if "=" in word or not rest else rest.pop(0)))
                continue
            if not word.startswith("--config."):
                plain.append(word)
                continue
            field, equals, value = word.removeprefix("--config.").partition("=")
            if not equals:
                if not rest:
                    raise InputError(f"{word} has no value; write {word}=VALUE")
                value = rest.pop(0)
            overrides.append((field, value))
        args = self.parse_args(plain)
        for name in (*_PATHS, "push"):
            # E.g. from an unset variable of the shell; a system call would take it for the current
            # directory. If a flag's default is "", that means none.
            if "" in _as_list(getattr(args, name, None)) and self.get_default(name) is None:
                flag = f"--{name}" if f"--{name}" in self._option_string_actions else name
                raise InputError(f"{flag} is missing, its value is empty; see --help")
        # Names that no file can have are refused here, before a system call fails on them. A shell
        # does not expand the ~ of --workdir=~/runs.
        for name in _PATHS:
            argument = getattr(args, name, None)
            for path in _as_list(argument):
                if path:
                    user_path(path, f"--{name}")
            if isinstance(argument, str) and argument.startswith("~"):
                setattr(args, name, str(user_path(argument)))
        return args, overrides


def _as_list(value: object) -> list[str]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def add_process_flags(parser: Parser) -> None:
    """Adds the flags of runs on several processes."""
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, for several processes")
    parser.add_argument("--processes", type=int, help="number of processes")
    parser.add_argument("--process", type=int, help="index of this process, from 0")
    parser.add_argument(
        "--cluster", action="store_true", help="detect the processes on Slurm or a TPU pod"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0,
        help="seconds to wait for the other processes (default: 300)",
    )  # fmt: skip


def add_profile_flag(parser: Parser) -> None:
    """Adds --profile."""
    parser.add_argument(
        "--profile", metavar="STEPS", help="write a trace of STEPS steps to WORKDIR/profile"
    )


def profile_override(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the config override of --profile."""
    return [] if args.profile is None else [("train.profile", args.profile)]


@contextlib.contextmanager
def join_processes(args: argparse.Namespace) -> Iterator[bool]:
    """Joins the other processes. Yields whether this process writes and prints."""
    from jaxprompt.parallel import processes

    with processes.exit_on_failure():
        processes.connect(
            args.coordinator, args.processes, args.process, cluster=args.cluster,
            timeout=args.timeout,
        )  # fmt: skip
        yield processes.is_first()


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
    else:
        check_single(args.workdir)
    saved = args.config or str(Path(args.workdir) / "config.json")
    if args.config is None and not os.path.isfile(saved):
        raise InputError(f"{saved} does not exist; give the --workdir of a run, or --config")
    return load_config(saved, overrides)
