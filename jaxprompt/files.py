"""Writes a file whole or not at all."""

import os
from pathlib import Path

from jaxprompt.errors import InputError


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
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise write_error(path, error) from error


def write_error(path: str | os.PathLike, error: OSError) -> InputError:
    """Returns the one-line error for a failed write to `path`."""
    reason = error.strerror or str(error)
    return InputError(f"cannot write {path}: {reason}; mend that, or take another folder")
