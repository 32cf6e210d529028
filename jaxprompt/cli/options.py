"""What the verbs share: flags, config files, overrides and their errors. Imports nothing heavy."""

import argparse
import ast
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxprompt.cli.blocks import replace_blocks, unknown_field
from jaxprompt.cli.configs import call, load_module
from jaxprompt.cli.results import check_single
from jaxprompt.errors import InputError, brief
from jaxprompt.files import read_json, user_path

_PATHS = ("config", "workdir", "output", "input", "prompt", "backbone", "npy", "peft")


class Parser(argparse.ArgumentParser):
    """Flags of a verb; what argparse refuses becomes an InputError."""

    def __init__(self, doc: str, config: bool = True, fields: bool = False):
        """Starts with --debug, and with --config and --workdir where the verb takes them.

        `fields`: --help lists those of a config too.
        """
        self._fields = fields
        super().__init__(
            prog="jaxprompt", description=doc, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if config:
            note = "; override a field with --config.FIELD=VALUE"
            self.add_argument(
                "--config", help="configs/x.py[:argument] or a saved config.json" + note
            )
            self.add_argument("--workdir", help="folder of the run")

    def error(self, message: str) -> NoReturn:
        """Raises InputError in place of argparse's exit."""
        raise InputError(f"{message}; see --help")

    def format_help(self) -> str:
        """Writes the help, the fields of a config behind the flags."""
        if not self._fields:
            return super().format_help()
        from jaxprompt.cli.reference import list_fields

        return f"{super().format_help()}\n{list_fields()}\n"

    def read(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
        """Parses the flags and sets the overrides (field, value) of the config apart."""
        plain, overrides, rest = [], [], list(argv)
        while rest:
            word = rest.pop(0)
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
        for name in _PATHS:
            if given := getattr(args, name, None):
                user_path(given, f"--{name}")
        return args, overrides


def add_hosts(parser: Parser) -> None:
    """Adds the flags of a run on several processes."""
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, for several processes")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="which of them this is, from 0")
    parser.add_argument("--cluster", action="store_true", help="find these on Slurm or a TPU pod")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for the others (default: 300)"
    )


@contextlib.contextmanager
def several_hosts(args: argparse.Namespace) -> Iterator[bool]:
    """Joins the other processes for a block. Yields whether this one writes and prints."""
    from jaxprompt.parallel import processes

    with processes.guard():
        processes.start(
            args.coordinator, args.processes, args.process, cluster=args.cluster,
            timeout=args.timeout,
        )  # fmt: skip
        yield processes.is_first()


def need(args: argparse.Namespace, *names: str) -> None:
    """Raises InputError for the first flag of `names` that is not given."""
    for name in names:
        if getattr(args, name) is None:
            raise InputError(f"--{name} is missing; see --help")


def load_run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Loads --config, or without one the config.json of --workdir.

    Raises InputError where the workdir holds no run or several.
    """
    if args.workdir is None:
        need(args, "config")
    else:
        check_single(args.workdir)
    saved = args.config or str(Path(args.workdir) / "config.json")
    if args.config is None and not Path(saved).is_file():
        raise InputError(f"{saved} does not exist; give the --workdir of a run, or a --config")
    return load_config(saved, overrides)


def load_config(path: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Loads a config and applies overrides. The result is locked.

    Raises InputError for an unreadable file, an unknown field or a value of another type.
    """
    file, colon, argument = path.partition(":") if path[-5:] != ".json" else (path, "", "")
    if file.endswith(".json"):
        config = _from_json(read_json(user_path(file), "a .py file or a saved config.json"))
    else:
        config = call(load_module(file), "get_config", file, *([argument] if colon else []))
    if not isinstance(config, ConfigDict):
        raise InputError(
            f"{path}: get_config() must return a ConfigDict, not {type(config).__name__}"
        )
    config.lock()
    apply(config, overrides)
    return config


def apply(config: ConfigDict, overrides: Sequence[tuple[str, Any]]) -> None:
    """Sets fields from text, in any order: a method that is named brings its block first."""
    overrides = [(field, str(value)) for field, value in overrides]
    replace_blocks(config, overrides)
    for field, value in overrides:
        override(config, field, value)


def override(config: ConfigDict, field: str, text: str) -> None:
    """Sets one field ("optim.lr") from text, in the type it has."""
    *parents, last = field.split(".")
    block = config
    for part in [*parents, last]:
        if not isinstance(block, ConfigDict) or part not in block:
            raise unknown_field(config, field, list(fields(config)))
        owner, block = block, block[part]
    if isinstance(block, ConfigDict):
        inside = ", ".join(f"{field}.{key}" for key in block)
        raise InputError(f"config field {field!r} is a block; set one of {inside}")
    owner[last] = _parse(field, text, owner.get_type(last))


def fields(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Lists the leaves of a config by dotted name."""
    leaves = {}
    for key in config:
        value, name = config[key], f"{prefix}{key}"
        leaves |= (
            fields(value, f"{name}.") if isinstance(value, Mapping | ConfigDict) else {name: value}
        )
    return leaves


def _parse(field: str, text: str, kind: type) -> Any:
    wrong = InputError(
        f"config field {field}={brief(text)} must be {_KINDS.get(kind, kind.__name__)}"
    )
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise wrong
        return text.lower() == "true"
    if text == "None" and kind is float:
        return None
    if field in _NUMBERS and text[:1] not in ("(", "["):
        text = f"({text},)"
    elif kind is tuple and text[:1] not in ("(", "["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        value = ast.literal_eval(text)
        return kind(value) if kind is not int or isinstance(value, int) else int("")
    except _NO_VALUE as error:
        raise wrong from error


# What Python's parser raises; the last three for what is nested too deeply or is too large.
_NO_VALUE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError)
_NUMBERS = tuple(f"runs.{name}" for name in ("seeds", "data_seeds", "lr", "weight_decay"))
_NUMBERS += ("ppt.thresholds",)
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list, as in a,b or ('a', 'b')",
}


def _from_json(value: Any) -> Any:
    """Turns JSON back into config values: lists are tuples, null is a number not set."""
    if isinstance(value, dict):
        for key in value:  # a dotted one, or the name of a method, makes ConfigDict another thing
            if not key.isidentifier() or hasattr(ConfigDict, key):
                raise InputError(f"unknown config field {brief(key)}; train --help lists them all")
        return ConfigDict({key: _from_json(part) for key, part in value.items()})
    if isinstance(value, list):
        return tuple(_from_json(part) for part in value)
    return placeholder(float) if value is None else value


def resolved(config: ConfigDict) -> dict[str, Any]:
    """Returns the config as plain JSON values."""
    return json.loads(json.dumps(config.to_dict()))
