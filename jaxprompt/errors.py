"""The exception for invalid user input, and small checks that raise it."""

import difflib
import importlib
import re
from collections.abc import Collection, Iterable, Mapping
from types import UnionType
from typing import Any

_TYPE_NAMES = {
    str: "text (Unicode)", bool: "true or false", int: "a whole number",
    float: "a finite number of float32", tuple: "a list of texts",
}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
FLOAT32 = 3.4028234663852886e38  # the largest float32


class InputError(ValueError):
    """Invalid user input. The message is one line: the value, the limit, and how to fix it.

    The command line prints it without a traceback and exits with 2.
    """


def check_extra(extra: str, package: str, need: str) -> None:
    """Raises InputError, which says what to install, if an optional package is missing.

    Args:
      extra: the extra of pyproject.toml that has the package.
      package: its name for `import`.
      need: what needs it, e.g. "task.metric=f1".
    """
    try:
        module = importlib.import_module(package)
        # A folder of that name, as wandb creates beside its runs, can be imported too.
        if getattr(module, "__file__", None) is None:
            raise ImportError(f"No module named {package!r}, only a folder")
    except ImportError as error:
        raise InputError(
            f"{need} needs the package {package} ({error}); run: pip install 'jaxprompt[{extra}]', "
            f"or in a checkout pip install '.[{extra}]'"
        ) from error


# Parts of the messages of XLA, CUDA, and cuBLASLt without memory for a handle.
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY", "Failed to initialize BLASLT")


def out_of_memory(error: BaseException) -> str:
    """Returns the message of an out-of-memory error, "" for other errors."""
    is_full = is_of_jax(error) and any(text in str(error) for text in _OUT_OF_MEMORY)
    return first_line(error) if is_full or isinstance(error, MemoryError) else ""


def is_of_jax(error: BaseException) -> bool:
    """Returns whether an error is a JaxRuntimeError, without importing jax."""
    return any(kind.__name__ == "JaxRuntimeError" for kind in type(error).__mro__)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error message, at most 200 characters."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(". ")


# Names that other tools use, in lower case -> names of this package; first those meant most likely.
_RELATED = {
    **dict.fromkeys(("fit", "finetune", "fine-tune", "tune"), ("train",)),
    **dict.fromkeys(("eval", "test", "score"), ("evaluate",)),
    **dict.fromkeys(("infer", "inference", "run", "generate"), ("predict",)),
    **dict.fromkeys(("lora", "qlora", "adapter", "adapters", "ia3"), ("prefix", "soft")),
    **dict.fromkeys(("prompt_tuning", "prompt-tuning"), ("soft",)),
    **dict.fromkeys(("prefix_tuning", "prefix-tuning", "p_tuning_v2", "ptuning_v2"), ("prefix",)),
}
_MAX_NEAR, _MAX_NAMES = 3, 20


def nearest(name: str, choices: Iterable[str]) -> str:
    """Suggests names for an unknown `name`: the nearest 3 of `choices`, or 20 if none is near."""
    choices = sorted(choices)
    related = [choice for choice in _RELATED.get(name.lower(), ()) if choice in choices]
    label, names = "known", choices[:_MAX_NAMES]
    if related or difflib.get_close_matches(name, choices, n=1, cutoff=0.5):
        similar = difflib.get_close_matches(name, choices, n=_MAX_NEAR, cutoff=0.0)
        label, names = "nearest", list(dict.fromkeys([*related, *similar]))[:_MAX_NEAR]
    remainder = f", ... ({len(choices)} in all)" if len(names) < len(choices) else ""
    return f"{label}: {', '.join(names)}{remainder}"


def with_article(word: str) -> str:
    """Adds the indefinite article to a word, e.g. "an electra"."""
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def escape(text: str) -> str:
    """Escapes characters that are not printable, e.g. "\\x1b" for ESC; newlines stay.

    Messages quote user data, which may contain terminal control codes and lone surrogates.
    """
    if text.isprintable():
        return text
    characters = (
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1]
        for character in text
    )
    return "".join(characters)


def brief(value: Any) -> str:
    """Returns the repr of a value for a message, cut to 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of over 4,300 digits; a deeply nested list
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else text[:80] + "..."


def check_known(name: str, value: Any, choices: Collection[str]) -> str:
    """Returns `value` if it is one of `choices`; `name` is a field, or words such as "the task".

    Raises InputError.
    """
    if value not in list(choices):
        equals = " " if " " in name else "="
        raise InputError(f"{name}{equals}{brief(value)} is unknown; {nearest(str(value), choices)}")
    return value


def is_kind(value: Any, kind: type) -> bool:
    """Returns whether a value has type `kind`: bool, int, float, str, or tuple of str.

    An int is accepted as a float. Floats must fit float32, and a str must not have half of a
    surrogate pair, which no file can contain.
    """
    if kind is tuple:
        return isinstance(value, tuple) and all(is_kind(part, str) for part in value)
    if isinstance(value, str):
        return isinstance(value, kind) and not _SURROGATE.search(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) <= FLOAT32
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises InputError if a value does not have the type of its field, see `is_kind`."""
    if not is_kind(value, kind):
        raise InputError(f"config field {name}={brief(value)} must be {_TYPE_NAMES[kind]}")


def check_type(argument: str, value: Any, kind: type | UnionType, advice: str) -> None:
    """Raises InputError if a Python argument has the wrong type; `advice` says what to pass."""
    if not isinstance(value, kind):
        raise InputError(f"{argument}={brief(value)} is a {type(value).__name__}; give {advice}")


def at_least(name: str, value: float, limit: float) -> None:
    """Raises InputError if a field is not a number or is below its limit."""
    if not isinstance(value, int | float):
        raise InputError(f"{name}={brief(value)} must be a number, at least {limit}")
    if not value >= limit:
        raise InputError(f"{name}={value} must be at least {limit}")


def list_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Lists up to three values that differ, by name, digests last; "" if none does.

    A name that one side lacks is None there.
    """
    differing = [
        f"{name} (saved {brief(saved.get(name))}, now {brief(current.get(name))})"
        for name in sorted(saved.keys() | current.keys(), key=lambda x: (x.endswith("digest"), x))
        if saved.get(name) != current.get(name)
    ]
    return ", ".join(differing[:3])
