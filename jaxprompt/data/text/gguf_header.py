"""Reads the header of a GGUF file: its metadata, and the positions of its tensors.

The layout is that of docs/gguf.md in github.com/ggml-org/ggml. The gguf package's reader makes an
array for each word of a vocabulary, which takes seconds, and maps the file into memory.
"""

import functools
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxprompt.errors import InputError, brief

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_TEXT, _ARRAY = 8, 9  # kinds of values; the others are numbers of a fixed size
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_AXES = 4  # GGML_MAX_DIMS
_ALIGNMENT = 32  # where general.alignment says nothing


class ArrayField(NamedTuple):
    """An array of the metadata, not read yet."""

    kind: int
    size: int
    start: int  # bytes into the file
    end: int


class TensorInfo(NamedTuple):
    """Shape, type and position of a tensor."""

    shape: tuple[int, ...]  # the last axis is contiguous, as numpy has it
    kind: int  # ggml's number of its type
    start: int  # bytes into the file


class Header(NamedTuple):
    """The contents of a GGUF file, as its header describes them."""

    path: Path
    size: int  # bytes of the file
    fields: dict[str, Any]  # by key: a number, a text, or an Array
    spans: dict[str, tuple[int, int]]  # by key: the byte range of the key and its value
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, "" if the file has none."""
        name = self.fields.get("general.architecture", "")
        return name if isinstance(name, str) else ""

    def array(self, key: str) -> list[Any]:
        """Returns an array of the metadata."""
        field = self.fields[key]
        if not isinstance(field, ArrayField):
            raise InputError(
                f"{self.path} has {key}={brief(field)}, which must be a list; download the file "
                "again"
            )
        with _open_file(self.path) as file:
            reader = _Reader(file, self.path, self.size, field.start)
            return list(reader.values(field.kind, field.size))

    def read_bytes(self, start: int, end: int) -> bytes:
        """Returns a range of bytes of the file."""
        with _open_file(self.path) as file:
            return _Reader(file, self.path, self.size, start).read(end - start)


def is_gguf(path: str | os.PathLike) -> bool:
    """Returns whether a path names a GGUF file."""
    return os.fspath(path).lower().endswith(SUFFIX)


def read_header(path: str | os.PathLike) -> Header:
    """Reads the header of a GGUF file; cached until the file changes.

    Raises InputError if the file cannot be read, is not a GGUF file, or is damaged.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _cached_header(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _cached_header(path: str, size: int, changed: int) -> Header:
    with _open_file(path) as file:
        reader = _Reader(file, Path(path), size)
        if size < len(_MAGIC) or reader.read(len(_MAGIC)) != _MAGIC:
            raise InputError(
                f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}; use a GGUF "
                "file, or a folder with config.json"
            )
        version = reader.number("I")
        if version not in (2, 3):
            # A big-endian 3, read as little-endian, is 3 * 2^24.
            kind = "of the other byte order" if version % 2**16 == 0 else f"of version {version}"
            raise InputError(
                f"{path} is a GGUF file {kind}, but only little-endian files of versions 2 and 3 "
                "are supported; convert the model again"
            )
        count, fields, spans, tensors = reader.number("Q"), {}, {}, {}
        for _ in range(reader.number("Q")):
            start = reader.at
            key = reader.text()
            if key in fields:
                raise reader.damaged(f"two values of {brief(key)}")
            fields[key] = reader.value()
            spans[key] = start, reader.at
        for _ in range(count):
            name = reader.text()
            if name in tensors:
                raise reader.damaged(f"two tensors {brief(name)}")
            tensors[name] = reader.tensor_info()
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.damaged(f"general.alignment={brief(alignment)}")
    # Positions of tensors count from the first aligned byte after the header.
    first = -(-reader.at // alignment) * alignment
    tensors = {name: info._replace(start=first + info.start) for name, info in tensors.items()}
    return Header(Path(path), size, fields, spans, tensors)


class _Reader:
    """Reads the parts of a file in their order."""

    def __init__(self, file: BinaryIO, path: Path, size: int, at: int = 0):
        self.file, self.path, self.size, self.at = file, path, size, at
        file.seek(at)

    def damaged(self, what: str) -> InputError:
        return InputError(f"{self.path} is damaged: its header has {what}; download it again")

    def read(self, count: int) -> bytes:
        try:
            # Compared with the file's size first, so that a damaged count allocates no memory.
            data = self.file.read(count) if count <= self.size - self.at else b""
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if len(data) < count:
            raise InputError(
                f"{self.path} is incomplete: it should continue after its last byte, "
                f"{self.size:,}; download it again"
            )
        self.at += count
        return data

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.read(struct.calcsize("<" + code)))
        return value

    def text(self) -> str:
        try:
            return self.read(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise self.damaged("a text that is not UTF-8") from None

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"a value of the unknown kind {kind}")
        kind, count = self.number("I"), self.number("Q")
        start = self.at
        if kind == _TEXT:
            for _ in range(count):
                self.read(self.number("Q"))
        elif kind in _NUMBERS:
            self.read(count * struct.calcsize("<" + _NUMBERS[kind]))
        else:
            raise self.damaged(f"a list of values of the unknown kind {kind}")
        return ArrayField(kind, count, start, self.at)

    def values(self, kind: int, count: int) -> Iterator[Any]:
        if kind == _TEXT:
            return (self.text() for _ in range(count))
        code = f"<{count}{_NUMBERS[kind]}"
        return iter(struct.unpack(code, self.read(struct.calcsize(code))))

    def tensor_info(self) -> TensorInfo:
        num_axes = self.number("I")
        if num_axes > _MAX_AXES:
            raise self.damaged(f"a tensor of {num_axes} axes")
        # ggml lists the contiguous axis first.
        shape = tuple(self.number("Q") for _ in range(num_axes))[::-1]
        # No type has less than one bit per number, so this detects any wrong shape.
        if math.prod(shape) > 8 * self.size:
            raise InputError(
                f"{self.path} is incomplete: it has {self.size:,} bytes, too few for a tensor of "
                f"shape {list(shape)}; download it again"
            )
        return TensorInfo(shape, self.number("I"), self.number("Q"))


def _open_file(path: str | os.PathLike) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | os.PathLike, error: OSError) -> InputError:
    return InputError(f"{os.fspath(path)} cannot be read ({error.strerror}); check the path")
