"""Reads the documents of a corpus: from text, JSON lines, Parquet, the hub or TFDS."""

import dataclasses
import glob
import itertools
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import file_errors, open_unpacked
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError, nearest
from jaxprompt.files import file_checksum, is_run, parse_json, user_path, utf8_advice

DOCUMENTS = ("file", "line", "blank")
ON_ERROR = ("raise", "skip")
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")

_CHUNK_BYTES = 2**20  # read at once
_LINE_FACTOR = 8  # maximum length of a JSON line over that of its text: escapes, other columns
_CLOCK_SECONDS = 2.0  # the coarsest clock of a file system (FAT; those of Linux have 1 to 10 ms)
_FINGERPRINT_ROWS = 256  # sampled from a data set of the hub or TFDS

Document = str | InputError  # the text, or the error of a document that cannot be read


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a source is divided into documents and units."""

    field: str = "text"  # column of JSON lines, Parquet, the hub, TFDS
    split: str = "train"  # of the hub and TFDS
    documents: str = "file"  # what is a document in a .txt: the file, a line, up to a blank line
    paragraphs: str = "line"  # of corpus.split.PARAGRAPHS
    units: str = "paragraph"  # of corpus.split.UNITS
    language: str = "en"  # of the sentences
    max_document: int = 2**24  # bytes
    on_error: str = "raise"  # or "skip": leave out documents that cannot be read

    def __post_init__(self):
        """Raises InputError for an unknown language; configs accept any."""
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise InputError(
                f"corpus language {self.language!r} must be an ISO 639 code, e.g. en or zh"
            )


class DocumentSource:
    """A source of documents: a folder, a file, a glob, hub:owner/name[:subset], tfds:name."""

    def __init__(self, place: str, settings: TextSettings, cache_dir: str | None = None):
        """Finds the files; raises InputError if there is nothing to read."""
        self.place = place
        self.settings = settings
        self.skipped = 0
        self.first_skipped = ""
        self._rows: Rows | None = None
        self.files: dict[str, Path] = {}
        self.stats: dict[str, int] = {}  # CRC-32 by `stat_key`, of settled files
        self._checksums: dict[str, int] = {}  # CRC-32 of all files, by name
        self.runs: list[str] = []  # run directories, whose files are not text of the corpus
        self.others: list[str] = []  # files whose names have other suffixes
        if place.startswith(("hub:", "tfds:")):
            # A task of one field, so that the readers of examples also read plain text.
            task = custom_task(fields=[settings.field])
            self._rows = read_split(task, settings.split, source=place, cache_dir=cache_dir)
        else:
            self.files, self.runs, self.others = _find_files(place)

    def __iter__(self) -> Iterator[str]:
        """Yields the documents in the order of their files' names; counts skipped ones."""
        self.skipped, self.first_skipped = 0, ""
        for document in self._documents():
            if isinstance(document, str):
                yield document
            elif self.settings.on_error == "raise":
                raise InputError(f"{document}; to skip such documents, set corpus.on_error=skip")
            else:
                self.skipped += 1
                self.first_skipped = self.first_skipped or str(document)

    def _documents(self) -> Iterator[Document]:
        if self._rows is not None:
            for i in range(len(self._rows)):
                yield _row_text(self._rows, i, self.settings)
        for path in self.files.values():
            with file_errors(path):
                yield from _reader(path)(path, self.settings)

    def fingerprint(self, checksums: Mapping[str, int]) -> dict[str, list[int]]:
        """Returns [bytes, CRC-32] of each file by its name, or [rows, CRC-32] of a data set.

        `checksums` has the CRC-32 of files that were read before, by `stat_key`; they are not read
        again.
        """
        if self._rows is not None:
            # Evenly over all rows: reading a whole data set would take as long as indexing it.
            step = max(1, len(self._rows) // _FINGERPRINT_ROWS)
            sample = range(0, len(self._rows), step)
            texts = [str(_row_text(self._rows, i, self.settings)) for i in sample]
            crc = zlib.crc32("\0".join(texts).encode("utf-8", "backslashreplace"))
            return {self.place: [len(self._rows), crc]}
        fingerprint = {}
        for name, path in self.files.items():
            with file_errors(path):
                key, size, is_settled = stat_key(path), path.stat().st_size, _is_settled(path)
                # The same key means that the file is unchanged since it was read.
                crc = checksums[key] if key in checksums else file_checksum(path)
                if is_settled:
                    self.stats[key] = crc
                self._checksums[name] = crc
            fingerprint[name] = [size, crc]
        return fingerprint

    def check_files_unchanged(self) -> None:
        """Raises InputError if a file has changed since `fingerprint`."""
        for name, path in self.files.items():
            with file_errors(path):
                # A file with a new link or mode has another key but the same text.
                is_same = path.is_file() and (
                    stat_key(path) in self.stats or file_checksum(path) == self._checksums[name]
                )
            if not is_same:
                raise InputError(
                    f"corpus file {name} changed while it was indexed; run the command again"
                )


def stat_key(path: Path) -> str:
    """Identifies a version of a file without reading it: path, size, inode and change times.

    A program can reset st_mtime, but not st_ctime.
    """
    stat = path.stat()
    times = f"{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    return f"{path.resolve()}:{stat.st_size}:{stat.st_ino}:{times}"


def _is_settled(path: Path) -> bool:
    """Returns whether another change would be visible in a file's times, which are coarse."""
    return time.time() - path.stat().st_ctime > _CLOCK_SECONDS


# -- files ----------------------------------------------------------------------------------------


def root_folder(place: str) -> Path | None:
    """Returns the folder that contains the files of a place; None for a file, the hub and TFDS."""
    if place.startswith(("hub:", "tfds:")) or os.path.isfile(folder := user_path(place)):
        return None
    parts = folder.parts if not os.path.isdir(folder) else ()
    literal = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    return Path(*literal) if parts else folder


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder, following links; each folder is visited once."""
    visited = {os.path.realpath(folder)}
    for parent, folders, files in os.walk(folder, followlinks=True):
        yield from (Path(parent, name) for name in files)
        # Folders before links to them.
        paths = {name: os.path.join(parent, name) for name in folders}
        folders.clear()
        for name in sorted(paths, key=lambda name: (os.path.islink(paths[name]), name)):
            if (real := os.path.realpath(paths[name])) not in visited:
                visited.add(real)
                folders.append(name)


def _find_files(place: str) -> tuple[dict[str, Path], list[str], list[str]]:
    """Returns the files of a place by name, sorted, then run folders, then other files."""
    folder = user_path(place)
    if os.path.isfile(folder):
        if not folder.name.endswith(SUFFIXES):
            raise InputError(f"corpus file {folder} must end in one of {', '.join(SUFFIXES)}")
        return {folder.name: folder}, [], []
    if os.path.isdir(folder):
        paths, top = list(_walk(folder)), folder
    elif glob.has_magic(str(folder)):
        matches = glob.glob(str(folder), recursive=True)
        by_depth = sorted(map(Path, matches), key=lambda path: (len(path.parts), path))
        # Of several links to one file, the path that is least deep.
        unique = {(os.path.realpath(path.parent), path.name): path for path in reversed(by_depth)}
        paths = [path for path in unique.values() if path.is_file()]
        top = Path(os.path.commonpath([path.parent for path in paths])) if paths else folder
    else:
        raise InputError(
            f"corpus {place!r} does not exist; use a folder, a file, a pattern such as "
            "folder/*.jsonl.gz, hub:owner/name or tfds:name"
        )
    root = root_folder(place) or folder
    paths = [p for p in paths if not any(x.startswith(".") for x in p.relative_to(root).parts)]
    texts = [path for path in paths if path.name.endswith(SUFFIXES) and path.is_file()]
    folders = {folder for path in texts for folder in path.parents if root in folder.parents}
    runs = set(filter(is_run, folders))
    texts = [path for path in texts if runs.isdisjoint(path.parents)]
    if not texts:
        listed = ", ".join(sorted(path.name for path in paths)[:8]) or "nothing"
        raise InputError(
            f"corpus {place!r} has no file to read ({', '.join(SUFFIXES)}); it has: {listed}"
        )
    # Relative names: a corpus that is moved keeps its fingerprint.
    names = (user_path(path.relative_to(top), "corpus file").as_posix() for path in texts)
    files = dict(zip(names, texts, strict=True))
    read = set(texts)
    others = [p for p in paths if p not in read and runs.isdisjoint(p.parents)]
    # Sorted, because their order numbers the documents and must not depend on the file system.
    return dict(sorted(files.items())), sorted(map(str, runs)), sorted(map(str, others))


def _reader(path: Path) -> Callable[[Path, TextSettings], Iterator[Document]]:
    if path.suffix == ".parquet":
        return _read_parquet
    return _read_text if path.name.endswith((".txt", ".txt.gz")) else _read_json_lines


def _read_text(path: Path, settings: TextSettings) -> Iterator[Document]:
    for line, offset, data in _split_file(path, settings.documents, settings.max_document):
        where = str(path) if settings.documents == "file" else f"{path}:{line}"
        if len(data) > settings.max_document:
            advice = ", or set corpus.documents=line or blank if the file has many"
            yield _length_error(where, settings.max_document, advice)
        else:
            yield _decode(data, where, offset)


def _read_json_lines(path: Path, settings: TextSettings) -> Iterator[Document]:
    limit = _LINE_FACTOR * settings.max_document
    for line, offset, data in _split_file(path, "line", limit):
        where = f"{path}:{line}"
        if len(data) > limit:
            yield InputError(
                f"{where}: a line of over {limit:,} bytes, {_LINE_FACTOR} x corpus.max_document; "
                "raise corpus.max_document"
            )
            continue
        text = _decode(data, where, offset)
        if isinstance(text, InputError):
            yield text
            continue
        try:
            yield _field_text(parse_json(text), where, settings)
        except ValueError as error:
            yield InputError(f"{where}: broken JSON ({error}); fix or remove this line")


def _split_file(path: Path, separator: str, limit: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields (line, offset, bytes) of the documents of a file, except blank ones.

    `separator` is one of DOCUMENTS. A document over `limit` is read only as far as needed to see
    that it is.
    """
    next_line, offset = 1, 0
    line, start, chunks, size = 1, 0, [], 0  # of the current document
    at_line_start = True
    with open_unpacked(path) as file:
        # A chunk is a line or part of a longer one: a file without line ends must not be read at
        # once.
        for chunk in iter(partial(file.readline, _CHUNK_BYTES), b""):
            ends_line = chunk.endswith(b"\n")
            if size <= limit:
                chunks.append(chunk)
            size += len(chunk)
            offset, next_line = offset + len(chunk), next_line + ends_line
            # White space ends a document only as a whole line, not as the end of a long one.
            is_blank_line = at_line_start and not chunk.strip()
            if ends_line and (separator == "line" or (separator == "blank" and is_blank_line)):
                if not all(map(bytes.isspace, chunks)):
                    yield line, start, b"".join(chunks)
                line, start, chunks, size = next_line, offset, [], 0
            at_line_start = ends_line
    if not all(map(bytes.isspace, chunks)):
        yield line, start, b"".join(chunks)


def _decode(data: bytes, where: str, offset: int) -> Document:
    try:
        # Without the byte order mark. Not utf-8-sig, whose errors count bytes after the mark.
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return InputError(
            f"{where}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {offset + error.start} "
            f"of the decompressed file); {utf8_advice(b'' if offset else data)}"
        )


def _read_parquet(path: Path, settings: TextSettings) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_CHUNK_BYTES) as file:
            names = file.schema_arrow.names
            if settings.field not in names:
                raise _field_error(str(path), settings.field, names)
            row = 0
            # In small batches, as a document may have any length.
            for batch in file.iter_batches(batch_size=64, columns=[settings.field]):
                # By name, because columns=["a.b"] also selects a column a that has a field b.
                for value in batch.column(settings.field):
                    row += 1
                    yield _value_text(value.as_py, f"{path}: row {row}", settings)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: broken Parquet file ({reason}); write it again") from None


# -- rows -----------------------------------------------------------------------------------------


def _row_text(rows: Rows, i: int, settings: TextSettings) -> Document:
    return _value_text(lambda: rows[i], rows.origin(i), settings)


def _value_text(read: Callable[[], Any], where: str, settings: TextSettings) -> Document:
    """Returns the text of a value, a row or the field itself, that `read` decodes."""
    try:
        value = read()
    except UnicodeDecodeError as error:
        return InputError(
            f"{where}: not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start} "
            "of the text); write the data again"
        )
    row = value if isinstance(value, dict) else {settings.field: value}
    return _field_text(row, where, settings)


def _field_text(row: Any, where: str, settings: TextSettings) -> Document:
    """Returns the text of a row."""
    if not isinstance(row, dict):
        return InputError(f"{where}: a row must be an object {{column: value}}, got {row!r:.40}")
    if settings.field not in row:
        return _field_error(where, settings.field, row)
    text = row[settings.field]
    if not isinstance(text, str):
        return InputError(f"{where}: field {settings.field!r} must be a string, got {text!r:.40}")
    fits = len(text.encode()) <= settings.max_document
    return text if fits else _length_error(where, settings.max_document)


def _field_error(where: str, field: str, names: Any) -> InputError:
    return InputError(
        f"{where}: there is no field {field!r}; {nearest(field, map(str, names))}; set corpus.field"
    )


def _length_error(where: str, limit: int, advice: str = "") -> InputError:
    return InputError(
        f"{where}: a document of over {limit:,} bytes; raise corpus.max_document{advice}"
    )
