"""The command line: `python -m jaxprompt COMMAND ...`, also installed as `jaxprompt`."""

import contextlib
import importlib
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping
from importlib import metadata

from jaxprompt import cli, hidden, signals
from jaxprompt.cli import Command, commands
from jaxprompt.errors import (
    InputError,
    escape,
    first_line,
    nearest,
    out_of_memory,
)
from jaxprompt.files import user_cache
from jaxprompt.parallel import libtpu

_CLI = cli.__name__
_GROUPS = {  # of the commands, for --help
    "train a prompt": ["train", "sweep", "pretrain", "validate", "plan"],
    "look at runs": ["show", "inspect", "evaluate"],
    "use a prompt": ["export", "predict", "router", "lm_eval"],
    "list what is available": ["methods", "heads", "backbones", "tasks"],
    "backbones and corpora": ["adapt", "convert", "tokenizer", "annotate"],
}
# Modes of JAX that refuse implicit conversions of shapes and dtypes. It reads them at its import.
_STRICT_MODES = ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION")
_MEMORY_ADVICE = (
    "lower data.batch, data.eval_batch, data.max_len or runs.size (predict: --batch), raise "
    "optim.accumulate, or set backbone.remat=full. To estimate the memory of a config: "
    "python -m jaxprompt plan"
)


def _shorten(message: str) -> str:
    """Joins a message to one line and cuts the middle out of a long one."""
    line = " ".join(message.split())
    return line if len(line) <= 3000 else f"{line[:2000]} ... {line[-900:]}"


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, or 2 for bad input.

    Bad input, SIGTERM and Ctrl-C print one line to stderr, see `signals`.
    """
    # XLA logs slowness and foreign compilation as errors. Real errors are raised as well.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    libtpu.set_flags()
    with signals.handled():
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except BaseException:
            if not signals.ending():
                raise
        if signals.ending():
            signals.print_stopped()
            return signals.exit_code()
        return code or signals.exit_code()


def _run(argv: list[str]) -> int:
    try:
        try:
            code = _command(argv)
        except SystemExit:  # from --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # here, because at exit Python reports a failed write itself
        return code
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        code, message = _failure(error)
        if not message or "--debug" in argv:
            raise
        print(escape(f"{' '.join(['jaxprompt', *argv[:1]])}: {message}"), file=sys.stderr)
        return code


def _failure(error: Exception) -> tuple[int, str]:
    """Returns the exit code and the message of an expected error; other errors have no message."""
    if isinstance(error, InputError):
        return 2, _shorten(str(error))
    if isinstance(error, OSError) and _is_stdout_error(error):
        return 2, f"cannot write to stdout: {error.strerror}; fix this, or redirect stdout"
    if reason := out_of_memory(error):
        return 2, f"{reason}; {_MEMORY_ADVICE}"
    if reason := _no_device(error):
        return 2, (
            f"JAX cannot start its devices: {reason}; free the GPU if another process uses its "
            "memory, install jax for this device, or set JAX_PLATFORMS=cpu"
        )
    from jaxprompt.parallel.processes import lost_process_message

    if reason := lost_process_message(error):
        # Not bad input, so that a launcher may try again.
        return 1, (
            f"another process of this run was lost, see its output ({reason}); run the same "
            "command again on all hosts to resume"
        )
    return 1, ""


def _no_device(error: Exception) -> str:
    """Returns why JAX could not start its devices, "" for other errors."""
    in_startup = any(
        frame.f_code.co_name == "backends" and frame.f_globals["__name__"] == "jax._src.xla_bridge"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    if not in_startup or not isinstance(error, RuntimeError | AssertionError):
        return ""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return first_line(error) if str(error) else f"no device of JAX_PLATFORMS={platforms} was found"


def _is_stdout_error(error: OSError) -> bool:
    """Returns whether printing to stdout failed: only commands print, other modules write files."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return error.filename is None and frame.f_globals["__name__"].startswith((__name__, _CLI))


def _overview(by_name: Mapping[str, Command]) -> str:
    """Returns the commands in groups, wrapped to the width of the terminal."""
    lines = ["usage: jaxprompt COMMAND [--help]", "       jaxprompt --version"]
    listed = {name for names in _GROUPS.values() for name in names}
    others = {"other": [name for name in by_name if name not in listed]}
    width = shutil.get_terminal_size().columns
    for group, names in (_GROUPS | others).items():
        lines += ["", group] if names else []
        lines += [
            textwrap.fill(
                f"  {name:11s}{by_name[name].description}", width, subsequent_indent=" " * 13
            )
            for name in names
        ]
    return "\n".join(lines)


def _command(argv: list[str]) -> int:
    by_name = commands()
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(by_name))
        return 0 if argv else 2
    if argv[0] == "--version":
        version = importlib.import_module(__package__).__version__
        print(f"jaxprompt {version}, jax {metadata.version('jax')}")
        return 0
    command, *rest = argv
    try:
        " ".join(argv).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the arguments are not UTF-8 ({error}); convert them") from error
    if command not in by_name:
        raise InputError(f"unknown command {command!r}; {nearest(command, by_name)}")
    return by_name[command].main(rest) or 0


def entry() -> None:
    """Runs the command line as a process, which a signal ends at any point."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        from jaxprompt.cli.completion import complete

        complete()
    _open_streams()
    hidden.hide("torch")  # from transformers, whose advice to install it would mislead the user
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for name in _STRICT_MODES:
        os.environ.pop(name, None)
    with contextlib.suppress(OSError):  # for the hub and other libraries, as for jaxprompt
        os.environ["XDG_CACHE_HOME"] = str(user_cache())
    signals.watch()
    code = main()
    signals.note("after the command had finished")
    _drop_unwritten()
    sys.exit(code)


def _open_streams() -> None:
    """Sets stdout and stderr to UTF-8; a closed stream is replaced by os.devnull."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed; print(file=None) would print to stdout
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        else:
            errors = "backslashreplace" if name == "stderr" else stream.errors
            stream.reconfigure(encoding="utf-8", errors=errors)


def _drop_unwritten() -> None:
    """Stops Python from flushing stdout again at exit after a failed write."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    entry()
