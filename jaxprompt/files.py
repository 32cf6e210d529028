"""Checked user paths and JSON, and atomic writes."""

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxprompt.errors import InputError, brief, escape

NAME = 255  # bytes of a file name on Linux
CONFIG, LOCK = "config.json", "lock"  # of a run: every --workdir has both
_OTHER_SUFFIXES = (".csv", ".tsv", ".parquet", ".gz")  # files that are read in other formats
# Files that mark the folder of a run, an export or a backbone.
_MARKER_FILES = ("prompt.json", "record.json", "result.json", "config.json", "metrics.jsonl")
_CHECKSUM = "checksum"  # field of a JSON document with the digest of its other fields
# Control characters that JSON does not escape, line separators, and marks that reorder text.
_CONTROLS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_BLOCK = 2**20  # bytes of a file that are read at a time
_SCRATCH_SECONDS = 3600.0  # no write takes so long


def user_path(text: str | os.PathLike, label: str = "path") -> Path:
    """Returns a user's path with `~` and `~name` expanded; `label` names it in messages.

    Raises InputError for a path that no file can have, before another system call fails on it.
    """
    try:
        path = Path(text).expanduser()
        str(path).encode()  # fails for bytes that are not UTF-8, which JSON could not record
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{label} {brief(str(text))} is not valid ({reason}); fix it") from error
    return path


def is_run(folder: Path) -> bool:
    """Returns whether a folder is the --workdir of a run."""
    return (folder / LOCK).is_file() and (folder / CONFIG).is_file()


def is_locked(workdir: str | os.PathLike) -> bool:
    """Returns whether a process currently holds the lock of a run directory."""
    path = Path(workdir) / LOCK
    if not path.is_file():  # opening a pipe would wait
        return False
    try:
        with open_regular(path) as file:  # closing it releases the lock
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def open_regular(path: str | os.PathLike, mode: str = "rb") -> BinaryIO:
    """Opens a regular file, following links.

    Raises OSError also for a folder, a pipe, a socket and a device: reading them may never end.
    """
    return cast(BinaryIO, open(path, mode, opener=_open_descriptor))


def read_bytes(path: str | os.PathLike) -> bytes:
    """Reads a regular file. Raises OSError, see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def _open_descriptor(path: str | os.PathLike, flags: int) -> int:
    # Not blocking: a pipe would wait for its other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code, reason = errno.EINVAL, "not a regular file"
        if stat.S_ISDIR(mode):
            code, reason = errno.EISDIR, os.strerror(errno.EISDIR)
        raise OSError(code, reason, os.fspath(path))
    return descriptor


def utf8_advice(start: bytes) -> str:
    """Returns how to convert a file to UTF-8, guessed from its first bytes."""
    if start.startswith(b"\x1f\x8b"):
        return "it is compressed with gzip: decompress it, or give its name the ending .gz"
    if start.startswith(b"PK\x03\x04"):
        return "it is a ZIP archive or an Excel workbook: unpack it, or save the workbook as CSV"
    is_utf16 = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return (
        f"convert the file, e.g. with iconv -f {'UTF-16' if is_utf16 else 'WINDOWS-1252'} -t UTF-8"
    )


def parse_json(text: str | bytes) -> Any:
    """Parses untrusted JSON.

    Raises ValueError for invalid JSON, too deep nesting, a duplicate key in one object, and a lone
    surrogate.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        value = _JSON.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {brief(duplicate)} appears twice in one object; keep one")
    return mapping


_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys)  # json.loads would make one per call


def dumps(value: Any, **options: Any) -> str:
    """Serialises to JSON; NaN and the infinities become strings, see `to_plain`."""
    return json.dumps(to_plain(value), allow_nan=False, **options)


def json_line(value: Any) -> str:
    """Serialises to JSON whose text is readable, and harmless on a terminal."""
    text = json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def to_plain(value: Any) -> Any:
    """Converts numpy and jax values to Python's, NaN and infinities to strings for float()."""
    if isinstance(value, dict):
        return {str(name): to_plain(part) for name, part in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """Reads a JSON object. Raises InputError; `expected` names the right file in its message."""
    try:
        value = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not valid JSON: {error}"
        raise InputError(f"{path} cannot be read ({reason}); give {expected}") from None
    if not isinstance(value, dict):
        raise InputError(
            f"{path} contains a {type(value).__name__}, not an object; give {expected}"
        )
    return value


def json_checksum(document: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON document's fields without its checksum, in any layout."""
    fields = {name: value for name, value in document.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def add_checksum(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON document with the checksum of its fields, which `pop_checksum` verifies."""
    return {**document, _CHECKSUM: json_checksum(document)}


def pop_checksum(document: dict[str, Any]) -> bool:
    """Removes the checksum of a document. Returns whether it matches the other fields."""
    return document.pop(_CHECKSUM, None) == json_checksum(document)


def file_checksum(path: str | os.PathLike) -> int:
    """Computes the CRC-32 of a file, a block at a time. Raises OSError."""
    crc = 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def folder_checksums(folder: Path) -> dict[str, int]:
    """Computes the CRC-32 of each file in a folder, by its path there. Raises OSError."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file_checksum(file) for file in files}


def user_cache() -> Path:
    """Returns the user's cache directory: $XDG_CACHE_HOME, or .cache in the home directory.

    For a user without a home that can be written to, creates a private one among the temporary
    files. Raises OSError if others can write to that one.
    """
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder)
    with contextlib.suppress(RuntimeError):  # without a home
        cache = Path.home() / ".cache"
        if cache.is_dir() or os.access(cache.parent, os.W_OK):
            return cache
    cache = Path(tempfile.gettempdir()) / f"jaxprompt-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    status = cache.lstat()  # it may be a link that somebody else created
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EACCES, "others can write there", str(cache))
    return cache


def make_folder(path: str | os.PathLike) -> Path:
    """Creates the folder `path` with its parents. Raises InputError if that fails."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error
    return path


def write_atomic(path: str | os.PathLike, data: bytes | str) -> None:
    """Writes `data` atomically, see `open_atomic`."""
    with open_atomic(Path(path)) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` at the end of the block: a reader sees the old or the new.

    If the block fails, nothing is left of it. Raises InputError if the write fails, e.g. on a full
    disk or in a read-only folder; the old file is then unchanged.
    """
    scratch = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        remove_scratch(path.parent, _SCRATCH_SECONDS)
        with open(scratch, "xb") as file:  # fails if it exists, even as a link
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise


def remove_scratch(folder: str | os.PathLike, age: float = 0.0) -> None:
    """Removes temporary files that interrupted calls of `write_atomic` left in a folder.

    Only those that were last changed `age` seconds ago, if other processes may write there.
    """
    for path in Path(folder).glob(f".{'[0-9a-f]' * 16}.tmp"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if time.time() - path.lstat().st_mtime >= age:
                path.unlink()


def check_output(output: str, sources: Mapping[str, str | os.PathLike], name: str = "") -> Path:
    """Checks --output before the work starts, and returns the path of the output file.

    Args:
      output: value of --output.
      sources: input files, by their name in a message.
      name: file name to use where `output` is a folder, for formats other than JSON lines. The
        folder is created later.

    Raises:
      InputError: the file cannot be written, it would overwrite one of `sources` or a file of a
        run, an export or a backbone, or its ending belongs to another format.
    """
    path = user_path(output, "--output")
    in_folder = path.is_dir() or output.endswith("/")
    path = user_path(path / name, "--output") if in_folder else path
    if path.is_dir() or (in_folder and not name):
        raise InputError(
            f"--output={output}: {path} is a folder; give a file, e.g. {path}/predictions.jsonl"
        )
    if path.exists() and not path.is_file():  # devices and pipes accept any format
        return path
    for label, source in sources.items():
        if path.exists() and os.path.exists(source) and path.samefile(source):
            raise InputError(f"--output={output} would overwrite {label}; give another file")
    suffix = Path(name).suffix or ".jsonl"
    ending = path.suffix.lower()
    if ending in _OTHER_SUFFIXES and ending != suffix:
        raise InputError(
            f"--output={output}: the format is {suffix}, not {ending}; change the ending"
        )
    real_path = Path(os.path.realpath(path))
    folder = real_path.parent
    is_marked = any((folder / marker).exists() for marker in _MARKER_FILES)
    is_foreign = real_path.name in _MARKER_FILES or real_path.suffix != suffix
    if path.exists() and is_marked and is_foreign:
        raise InputError(
            f"--output={output} would replace a file in the folder of a run, an export or a "
            f"backbone; give another file, e.g. {folder}/predictions{suffix}"
        )
    while in_folder and not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"--output={output}: {folder} is not a folder that you can write to; create it, or "
            "give another folder"
        )
    return path


def check_foreign_files(folder: str | os.PathLike, expected: Collection[str], writer: str) -> None:
    """Raises InputError if a folder contains files that `writer` does not create."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(folder, error) from error
    if foreign := [name for name in names if name not in expected]:
        raise InputError(
            f"{folder} contains {foreign[0]}, which is not part of this {writer}; delete it, or "
            "give another folder"
        )


def write_output(path: Path, texts: Iterable[str]) -> None:
    """Writes texts to a user's path; links are followed, devices and pipes get each at once.

    Raises InputError as `open_atomic` does, and BrokenPipeError if the reader of a pipe is gone.
    """
    try:
        info = os.stat(path)
    except OSError:
        info = None
    if info and _is_stdout(info):  # /dev/stdout may be a file that others write to, too
        for text in texts:
            sys.stdout.write(text)
            sys.stdout.flush()
    elif info is None or stat.S_ISREG(info.st_mode):
        with open_atomic(Path(os.path.realpath(path))) as file:
            file.writelines(text.encode() for text in texts)
    else:
        try:
            with os.fdopen(os.open(path, os.O_WRONLY), "wb") as device:
                for text in texts:
                    device.write(text.encode())
                    device.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise write_error(path, error) from error


def _is_stdout(info: os.stat_result) -> bool:
    try:
        return os.path.samestat(info, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # a stream without a file descriptor
        return False


def open_scratch(path: Path) -> BinaryIO:
    """Opens a file for reading and writing, and creates it if it does not exist.

    For lock files and temporary files with a fixed name. Raises OSError if the path is a link or
    not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(_open_descriptor(path, flags), "r+b")


def acquire_lock(path: Path, directory: Path, advice: str) -> int:
    """Opens and locks the lock file `path` of a directory. Returns its file descriptor.

    The system releases the lock when the process dies. Without locks in the file system a warning
    is printed. Raises InputError with `advice` if another process holds the lock.
    """
    # Not by filelock, of which datasets accepts every version. Measured: 3.20 and 3.29 erase the
    # holder's name when another process tries to lock, and 3.29 deletes the file, which marks runs.
    while True:
        try:
            # Links are not followed, because the file is truncated below.
            descriptor = _open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise write_error(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = (
                    os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
                )
                os.close(descriptor)
                raise InputError(
                    f"{directory} is in use by {holder}; wait until it ends, or {advice}"
                ) from error
            message = f"{path} cannot be locked ({error.strerror}); start only one run at a time"
            print(escape(message), file=sys.stderr)
            return descriptor
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        except FileNotFoundError:  # another process removed it before it was locked
            pass
        except OSError as error:  # e.g. a full disk, or a pipe
            os.close(descriptor)
            raise write_error(path, error) from error
        os.close(descriptor)


def write_error(path: str | os.PathLike, error: OSError) -> InputError:
    """Returns the InputError for a failed write to `path`."""
    reason = error.strerror or str(error)
    return InputError(f"cannot write {path}: {reason}; fix this, or use another folder")
