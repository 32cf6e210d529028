"""The store of an indexed corpus: memory-mapped token ids, and where units and documents begin."""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxprompt.corpus.encode import EncodedDocuments
from jaxprompt.errors import InputError
from jaxprompt.files import (
    add_checksum,
    file_checksum,
    parse_json,
    pop_checksum,
    read_bytes,
    write_error,
)

META = "meta.json"  # written last: a folder without it is not a store
FORMAT = 2

_FILES = {"ids": "tokens.bin", "units": "units.bin", "documents": "documents.bin"}
_MAX_CHANGES = 3  # listed in an error
_COUNTED_IDS = 2**24  # in one call


class Corpus:
    """An indexed corpus.

    Numbers of documents and units depend only on text and settings, so stores of two tokenizers
    agree on them.

    Ids are returned as views of the file: read-only, uint16 or uint32.
    """

    def __init__(self, folder: str | os.PathLike, *, verify: bool = True):
        """Opens a store; with `verify` its files are read once to check their checksums.

        Raises InputError if there is none, or if it is damaged.
        """
        self.folder = Path(folder)
        meta = read_meta(self.folder / META, FORMAT)
        if meta is None:
            raise InputError(
                f"{self.folder}: there is no corpus store, or it is not finished; index the corpus"
            )
        self.checksums: dict[str, int] = meta["checksums"]  # CRC-32 by the name of a file
        self.fingerprint: dict[str, Any] = meta["fingerprint"]  # JSON; see `check_unchanged`
        self.num_units: int = meta["units"]
        self.num_tokens: int = meta["tokens"]
        self.max_id: int = meta["max_id"]
        self.skipped: int = meta["skipped"]  # documents that could not be read
        self.first_skipped: str = meta["first_skipped"]  # and why
        self.empty: int = meta["empty"]  # documents without text, left out too
        self.repeats: int = meta["repeats"]  # documents whose tokens an earlier one has
        self._count: int = meta["documents"]
        if verify:
            for file in _FILES.values():
                # Read, not through a map: its pages would count as memory of this process.
                check_file(self.folder / file, self.checksums[file])
        sizes = {
            "ids": (meta["dtype"], self.num_tokens),
            "units": ("<i8", self.num_units + 1),
            "documents": ("<i8", self._count + 1),
        }
        # Plain arrays over the maps: each slice of np.memmap takes microseconds.
        self._ids, self._units, self._documents = (
            np.asarray(np.memmap(self.folder / _FILES[name], dtype, "r", shape=(size,)))
            for name, (dtype, size) in sizes.items()
        )

    def __len__(self) -> int:
        """Returns the number of documents."""
        return self._count

    def notes(self) -> list[str]:
        """Returns messages about skipped and repeated documents."""
        lines = []
        if self.skipped:
            lines.append(f"{self.skipped} documents were skipped, the first: {self.first_skipped}")
        if self.repeats:
            lines.append(
                f"{self.repeats:,} of {len(self):,} documents are exact copies of another; one of "
                "two equal documents may be held out and the other trained on: remove duplicates"
            )
        return lines

    def document(self, number: int) -> list[np.ndarray]:
        """Returns the ids of each unit of a document."""
        return [self.unit(i) for i in self.units(number)]

    def tokens(self, number: int) -> np.ndarray:
        """Returns the ids of a document, unit after unit. [tokens]"""
        units = self.units(number)
        return self._ids[self._units[units.start] : self._units[units.stop]]

    def units(self, number: int) -> range:
        """Returns the numbers of the units of a document; every unit of a corpus has one."""
        return range(int(self._documents[number]), int(self._documents[number + 1]))

    def unit(self, unit: int) -> np.ndarray:
        """Returns the ids of a unit by its number; none if a tokenizer drops its text. [tokens]"""
        return self._ids[self._units[unit] : self._units[unit + 1]]

    def unit_lengths(self, number: int) -> np.ndarray:
        """Returns the number of tokens of each unit of a document. [units]"""
        units = self.units(number)
        return np.diff(self._units[units.start : units.stop + 1])

    def token_counts(self) -> np.ndarray:
        """Counts the occurrences of each id in the corpus. int64 [max_id + 1]"""
        total = np.zeros(self.max_id + 1, np.int64)
        for start in range(0, self.num_tokens, _COUNTED_IDS):
            # In parts, because bincount makes an int64 copy of its input.
            total += np.bincount(self._ids[start : start + _COUNTED_IDS], minlength=len(total))
        return total

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each document. [documents]"""
        return np.diff(self._units[self._documents])

    def __reduce__(self):
        """Sends the folder, not the ids, to other processes."""
        # A pickled memory map would contain all of its bytes. Workers need not verify the files
        # again.
        return partial(Corpus, verify=False), (self.folder,)


def damage_error(path: Path) -> InputError:
    """Returns the one-line error for a file that cannot be used as it is."""
    return InputError(
        f"{path} is damaged, or from another version of jaxprompt; delete {path.parent}, and run "
        "the command that made it again"
    )


def check_file(path: Path, checksum: int) -> None:
    """Raises InputError if a file is missing or does not match its CRC-32."""
    try:
        is_intact = file_checksum(path) == checksum
    except OSError:
        is_intact = False
    if not is_intact:
        raise damage_error(path)


def read_meta(path: Path, version: int) -> dict[str, Any] | None:
    """Reads the JSON file of a store or of its annotations; None if it does not exist.

    Raises InputError for a file that is incomplete, changed or of another version of the format.
    """
    try:
        meta = parse_json(read_bytes(path))
        is_intact = pop_checksum(meta) and meta["format"] == version
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        is_intact = False
    if not is_intact:
        raise damage_error(path)
    return meta


def store_name(fingerprint: Mapping[str, Any]) -> str:
    """Returns the name of the store of a fingerprint."""
    # With the format, so that another layout is another store.
    text = json.dumps([FORMAT, fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class StoreWriter:
    """Writes a store, part by part; `seal` finishes it."""

    def __init__(self, folder: Path, dtype: str):
        """Opens the files of a new store in `folder`, which exists and is empty."""
        self.documents = self.num_units = self.tokens = self.empty = 0
        self._folder = folder
        self._dtype = dtype
        self._max_id = 0
        self._digests = [np.zeros(0, "<u8")]  # of documents
        self._checksums = dict.fromkeys(_FILES.values(), 0)
        with contextlib.ExitStack() as stack:  # a full disk leaves no file open
            self._files = {
                name: stack.enter_context(open(folder / file, "wb"))
                for name, file in _FILES.items()
            }
            for name in ("units", "documents"):
                # n units have n + 1 bounds, the first of which is 0.
                self._write(name, np.zeros(1, "<i8"))
            self._exit_stack = stack.pop_all()

    def add(self, part: EncodedDocuments) -> None:
        """Appends documents, except those without units."""
        counts = part.units[part.units > 0]
        ends = np.cumsum(part.lengths)[np.cumsum(counts) - 1]  # of documents, in tokens
        texts = (
            np.split(np.ascontiguousarray(part.ids, self._dtype), ends[:-1]) if len(ends) else []
        )
        digests = [hashlib.blake2b(ids.data, digest_size=8).digest() for ids in texts]
        self._digests.append(np.frombuffer(b"".join(digests), "<u8"))
        # Bounds continue from what is already written.
        self._write("documents", self.num_units + np.cumsum(counts))
        self._write("units", self.tokens + np.cumsum(part.lengths))
        self._write("ids", part.ids)
        self.documents += len(counts)
        self.empty += len(part.units) - len(counts)
        self.num_units += len(part.lengths)
        self.tokens += len(part.ids)
        self._max_id = max(self._max_id, int(part.ids.max(initial=0)))

    def _write(self, name: str, values: np.ndarray) -> None:
        dtype = self._dtype if name == "ids" else "<i8"
        data = np.ascontiguousarray(values, dtype).data
        self._files[name].write(data)
        file = _FILES[name]
        self._checksums[file] = zlib.crc32(data, self._checksums[file])

    def seal(self, **fields: Any) -> None:
        """Flushes everything to disk, then writes the file that makes the folder a store."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        repeats = self.documents - len(np.unique(np.concatenate(self._digests)))
        meta = dict(
            format=FORMAT,
            dtype=self._dtype,
            documents=self.documents,
            units=self.num_units,
            tokens=self.tokens,
            max_id=self._max_id,
            empty=self.empty,
            repeats=repeats,
            checksums=self._checksums,
            **fields,
        )
        with open(self._folder / META, "w", encoding="utf-8") as meta_file:
            json.dump(add_checksum(meta), meta_file, indent=1)
            meta_file.flush()
            os.fsync(meta_file.fileno())

    def close(self) -> None:
        """Closes the files, sealed or not. Raises InputError if the rest cannot be written."""
        try:
            self._exit_stack.close()
        except OSError as error:
            raise write_error(self._folder, error) from error


def check_unchanged(
    saved: Mapping[str, Any], current: Mapping[str, Any], advice: str = "use another workdir"
) -> None:
    """Raises InputError, with what changed, if two fingerprints differ."""
    pairs = {"the tokenizer": (saved["tokenizer"], current["tokenizer"])}
    for kind, prefix in (("files", ""), ("settings", "corpus.")):
        for name in sorted(saved[kind].keys() | current[kind].keys()):
            pairs[prefix + name] = saved[kind].get(name), current[kind].get(name)
    changes = [
        f"{name} was {old or 'absent'}, and is {new or 'absent'}"
        for name, (old, new) in pairs.items()
        if old != new
    ]
    if changes:
        raise InputError(
            f"the corpus is not the one of the saved run: {'; '.join(changes[:_MAX_CHANGES])} "
            f"({len(changes)} changes); restore it, or {advice}"
        )
