"""The command line: `python -m jaxprompt COMMAND ...`, also installed as `jaxprompt`."""

import importlib
import os
import pkgutil
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

from jaxprompt import cli, hidden, signals
from jaxprompt.errors import (
    InputError,
    escape,
    first_line,
    has_surrogate,
    nearest,
    out_of_memory,
)

_CLI = cli.__name__


def commands() -> dict[str, str]:
    """Returns the commands (modules with a main()) and the first line of their docstrings."""
    docstrings = {}
    for name in (module.name for module in pkgutil.iter_modules(cli.__path__)):
        module = importlib.import_module(f"{_CLI}.{name}")
        if hasattr(module, "main"):
            docstrings[name] = (module.__doc__ or "").partition("\n")[0]
    return docstrings


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
    command, rest = argv[0] if argv else "", argv[1:]
    program = f"jaxprompt {command}".rstrip()
    debug = "--debug" in rest
    try:
        try:
            code = _command(argv)
        except SystemExit:  # from --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # here, because at exit Python reports a failed write itself
        return code
    except InputError as error:
        if debug:
            raise
        print(escape(f"{program}: {_shorten(str(error))}"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        code = 2
        if isinstance(error, OSError) and _is_stdout_error(error):
            reason = f"cannot write to stdout: {error.strerror}; fix this, or redirect stdout"
        elif reason := out_of_memory(error):
            reason = f"{reason}; {_memory_advice(rest)}"
        elif reason := _no_device(error):
            reason = (
                f"JAX cannot start its devices: {reason}; free the GPU if another process uses "
                "its memory, install jax for this device, or set JAX_PLATFORMS=cpu"
            )
        elif reason := _lost(error):
            code = 1  # not bad input, so that a launcher may try again
            reason = (
                f"another process of this run was lost, see its output ({reason}); run the "
                "same command again on all hosts to resume"
            )
        if debug or not reason:
            raise
        print(escape(f"{program}: {reason}"), file=sys.stderr)
        return code


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


def _lost(error: Exception) -> str:
    """Returns the message of an error caused by a lost process, "" for other errors."""
    from jaxprompt.parallel import processes

    return processes.lost_process_message(error)


def _is_stdout_error(error: OSError) -> bool:
    """Returns whether printing to stdout failed: only commands print, other modules write files."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return error.filename is None and frame.f_globals["__name__"].startswith((__name__, _CLI))


def _command(argv: list[str]) -> int:
    descriptions = commands()
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:10s}{line}" for name, line in descriptions.items())
        print(f"usage: jaxprompt COMMAND [--help]\n       jaxprompt --version\n\n{lines}")
        return 0 if argv else 2
    if argv[0] == "--version":
        version = importlib.import_module(__package__).__version__
        print(f"jaxprompt {version}, jax {metadata.version('jax')}")
        return 0
    command, *rest = argv
    for word in argv:
        if has_surrogate(word):  # how Python represents bytes that are not UTF-8
            raise InputError(f"argument {word!r} is not UTF-8; convert it or rename the file")
    if command not in descriptions:
        raise InputError(f"unknown command {command!r}; {nearest(command, descriptions)}")
    return importlib.import_module(f"{_CLI}.{command}").main(rest) or 0


def _memory_advice(argv: Sequence[str]) -> str:
    """Returns which fields to lower after running out of memory, and a `plan` command."""
    from jaxprompt.config.load import load_config
    from jaxprompt.runs.grid.expand import is_grid

    try:
        words, args = _config_words(argv)
        config = load_config(*args)
    except InputError:  # predict has no config
        return "lower --batch"
    fields = config.leaves()
    with_value = lambda field: f"{field} (now {fields[field]})"
    fields_to_lower = [
        with_value(field) for field in ("data.batch", "data.eval_batch", "data.max_len")
    ]
    if is_grid(config):
        fields_to_lower.insert(
            0, f"{with_value('runs.size')}: runs that train at once, 0 means all that fit"
        )
    advice = [f"lower {', '.join(fields_to_lower)}", f"raise {with_value('optim.accumulate')}"]
    if config.backbone.remat != "full":
        advice.append("set backbone.remat=full")
    if config.objective.name:  # adapt, which plan does not support
        return ", ".join(advice)
    plan_words = [word for word in words if not word.startswith("--config.runs.")]
    plan = shlex.join(["python", "-m", "jaxprompt", "plan", *plan_words])
    return f"{', '.join(advice)}. To estimate the memory of this config: {plan}"


def _config_words(argv: Sequence[str]) -> tuple[list[str], tuple[str, list[tuple[str, str]]]]:
    """Returns the config arguments of a command, and the arguments of `load_config`."""
    from jaxprompt.cli.options import Parser, require_flags

    words, remaining = [], list(argv)
    while remaining:
        word = remaining.pop(0)
        if word.partition("=")[0] == "--config" or word.startswith("--config."):
            words.append(word if "=" in word or not remaining else f"{word}={remaining.pop(0)}")
    args, overrides = Parser("", "").read(words)
    require_flags(args, "config")
    return words, (args.config, overrides)


def entry() -> None:
    """Runs the command line as a process, which a signal ends at any point."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        from jaxprompt.cli.completion import complete

        complete(commands())
    _open_streams()
    # transformers imports torch if it is installed, which takes seconds, but only its tokenizers
    # are needed here. Its advice to install torch would mislead the user.
    hidden.hide("torch")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
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
