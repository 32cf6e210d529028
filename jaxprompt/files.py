"""Paths and JSON that come from outside, checked; files written whole or not at all."""

import contextlib
import json
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from jaxprompt.errors import InputError, brief, has_surrogate

DEPTH = 64  # levels of JSON: far more than anything read here has, and safe to walk recursively
NAME, PATH = 255, 4095  # bytes of a file's name and of a path on the systems that this runs on


def user_path(text: str | os.PathLike, what: str = "path") -> Path:
    """Makes a path of what a user gave, `~` and `~name` expanded; `what` it is.

    Raises InputError for what no file can be called, before a system call fails on it.
    """
    text = os.fspath(text)
    if "\0" in text:
        raise InputError(f"{what} {brief(text)} holds a NUL character; take it out")
    if has_surrogate(text):
        raise InputError(f"{what} {brief(text)} is not UTF-8; rename the file")
    longest = max((len(part.encode()) for part in text.split("/")), default=0)
    if longest > NAME or len(text.encode()) > PATH:
        raise InputError(
            f"{what} {brief(text)} is too long: a name has at most {NAME} bytes, a path {PATH}"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{what} {brief(text)}: {error}; write the folder out") from error


def parse_json(text: str | bytes) -> Any:
    """Parses JSON that anyone may have written.

    Raises ValueError where it is broken, nested deeper than DEPTH, has a key twice in one object,
    or holds half a surrogate pair.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    level, depth = [value], 1
    while level := [part for one in level for part in _parts(one)]:
        depth += 1
        if depth > DEPTH:
            raise ValueError(f"nested deeper than {DEPTH} levels")
    if "\\u" in text and has_surrogate(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half a surrogate pair; mend the escape that begins with \\ud")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {brief(twice)} stands twice in one object; keep one")
    return found


def _parts(value: Any) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if type(value) is list else ()
    return [part for part in parts if isinstance(part, dict | list)]


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """Reads a JSON object; `expected` says in the error what the user should have pointed at."""
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give {expected}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give {expected}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); give {expected}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}, not an object; give {expected}")
    return value


def user_cache() -> Path:
    """Returns the folder of what the user's programs can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def make_folder(path: str | os.PathLike) -> Path:
    """Makes the folder `path` with its parents. Raises InputError where that cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error
    return path


def write_atomic(path: str | os.PathLike, data: bytes | str) -> None:
    """Writes `data` to a file beside `path`, then renames it: a reader sees the old or the new.

    Raises InputError when the disk is full, the folder is read-only and the like; the old file
    is then untouched.
    """
    path = Path(path)
    data = data.encode() if isinstance(data, str) else data
    scratch = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with new_file(scratch) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise


def new_file(path: Path) -> BinaryIO:
    """Makes a file to write bytes to, where there is none: a link planted there is not followed."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")


def open_scratch(path: Path) -> BinaryIO:
    """Opens a file of a fixed name to read and write, made where there is none.

    For locks, and scratch that must be found again. Raises OSError where a link stands there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "r+b")


def write_error(path: str | os.PathLike, error: OSError) -> InputError:
    """Returns the one-line error for a failed write to `path`."""
    reason = error.strerror or str(error)
    return InputError(f"cannot write {path}: {reason}; mend that, or take another folder")
