"""Reads the header of a GGUF file: its metadata, and the positions of its tensors.

The layout is that of docs/gguf.md in github.com/ggml-org/ggml. gguf.GGUFReader makes an array for
each word of a vocabulary: on SmolLM2's 49,152 words and 48,900 merges it takes 5.6 s and 160 MB in
each process, this 0.3 s (gguf 0.19), and Llama 3 has three times as many words.
"""

import functools
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxprompt.errors import InputError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_TEXT, _ARRAY, _UINT64 = 8, 9, 10  # kinds of values; the others are numbers of a fixed size
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_ALIGNMENT = 32  # where general.alignment says nothing
_DAMAGE = (EOFError, KeyError, TypeError, ValueError, ZeroDivisionError, struct.error)


class ArrayField(NamedTuple):
    """An array of the metadata, not read yet."""

    kind: int
    size: int
    start: int  # bytes into the file


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
        with open(self.path, "rb") as file:
            return _Reader(file, self.size, field.start).values(field.kind, field.size)

    def read_bytes(self, start: int, end: int) -> bytes:
        """Returns a range of bytes of the file."""
        with open(self.path, "rb") as file:
            return _Reader(file, self.size, start).read(end - start)


def is_gguf(path: str | os.PathLike) -> bool:
    """Returns whether a path names a GGUF file."""
    return os.fspath(path).lower().endswith(SUFFIX)


def read_header(path: str | os.PathLike) -> Header:
    """Reads the header of a GGUF file; cached until the file changes.

    Raises InputError if the file cannot be read, is not a GGUF file, or is damaged.
    """
    try:
        status = os.stat(path)
        return _cached_header(os.path.abspath(path), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the path") from error


@functools.lru_cache(maxsize=4)
def _cached_header(path: str, size: int, changed: int) -> Header:
    with open(path, "rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
        if magic != _MAGIC:
            raise InputError(
                f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}; use a GGUF "
                "file, or a folder with config.json"
            )
        # A big-endian 3, read as little-endian, is 3 * 2^24.
        if version not in (2, 3):
            raise InputError(
                f"{path} is a GGUF file of version {version} or of the other byte order, but only "
                "little-endian files of versions 2 and 3 are supported; convert the model again"
            )
        try:
            return _read_header(_Reader(file, size, file.tell()), Path(path))
        # An unknown kind of value, an impossible length, a text that is not UTF-8.
        except _DAMAGE as error:
            raise InputError(
                f"{path} is incomplete or damaged: its header cannot be read; download it again"
            ) from error


def _read_header(reader: "_Reader", path: Path) -> Header:
    num_tensors, fields, spans = reader.number("Q"), {}, {}
    for _ in range(reader.number("Q")):
        start = reader.at
        key = reader.text()
        fields[key] = reader.value()
        spans[key] = start, reader.at
    tensors = dict(reader.tensor_info() for _ in range(num_tensors))
    # Positions of tensors count from the first aligned byte after the header.
    alignment = fields.get("general.alignment", _ALIGNMENT)
    first = -(-reader.at // alignment) * alignment
    tensors = {name: info._replace(start=first + info.start) for name, info in tensors.items()}
    return Header(path, reader.size, fields, spans, tensors)


class _Reader:
    """Reads the parts of a file in their order."""

    def __init__(self, file: BinaryIO, size: int, at: int):
        self.file, self.size, self.at = file, size, at
        file.seek(at)

    def read(self, count: int) -> bytes:
        # Checked first, so that a damaged count allocates no memory.
        if count > self.size - self.at:
            raise EOFError(f"{count} bytes at {self.at}")
        self.at += count
        return self.file.read(count)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.read(struct.calcsize("<" + code)))
        return value

    def text(self) -> str:
        return self.read(self.number("Q")).decode()

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        start = self.at
        if kind == _TEXT:
            for _ in range(count):
                self.read(self.number("Q"))
        else:
            self.read(count * struct.calcsize("<" + _NUMBERS[kind]))
        return ArrayField(kind, count, start)

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == _TEXT:
            return [self.text() for _ in range(count)]
        code = f"<{count}{_NUMBERS[kind]}"
        return list(struct.unpack(code, self.read(struct.calcsize(code))))

    def tensor_info(self) -> tuple[str, TensorInfo]:
        name = self.text()
        # ggml lists the contiguous axis first.
        shape = self.values(_UINT64, self.number("I"))[::-1]
        return name, TensorInfo(tuple(shape), self.number("I"), self.number("Q"))
