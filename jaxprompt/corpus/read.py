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

from jaxprompt.corpus.split import PARAGRAPHS, UNITS
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import reading, unpacking
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError, nearest
from jaxprompt.files import file_checksum, is_run, parse_json, user_path, utf8_advice

DOCUMENTS = ("file", "line", "blank")
ON_ERROR = ("raise", "skip")
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")

_CHUNK = 2**20  # bytes read at once
_LINE = 8  # times as long as its text may a line of JSON be, for escapes and other columns
_CLOCK = 2.0  # seconds, the coarsest clock of a file system (FAT; those of Linux have 1 to 10 ms)
_SAMPLED = 256  # rows that stand for a data set whose files are not ours to read

Document = str | InputError  # what is wrong with a document comes in its place


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a source is divided into documents and units."""

    field: str = "text"  # column of JSON lines, Parquet, the hub, TFDS
    split: str = "train"  # of the hub and TFDS
    documents: str = "file"  # what is a document in a .txt: the file, a line, up to a blank line
    paragraphs: str = "line"  # of PARAGRAPHS
    units: str = "paragraph"  # of UNITS
    language: str = "en"  # of the sentences
    max_document: int = 2**24  # bytes
    on_error: str = "raise"  # or "skip": leave out documents that cannot be read

    def __post_init__(self):
        """Checks values that come from a config."""
        known = {
            "documents": DOCUMENTS, "paragraphs": PARAGRAPHS, "units": UNITS, "on_error": ON_ERROR,
        }  # fmt: skip
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise InputError(
                    f"corpus {name} {getattr(self, name)!r} is unknown; use one of "
                    f"{', '.join(values)}"
                )
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise InputError(
                f"corpus language {self.language!r} must be an ISO 639 code, e.g. en or zh"
            )
        if self.max_document < 1:
            raise InputError(f"corpus max_document {self.max_document} must be at least 1 byte")


class Source:
    """A source of documents: a folder, a file, a glob, hub:owner/name[:subset], tfds:name."""

    def __init__(self, place: str, settings: TextSettings, cache_dir: str | None = None):
        """Finds the files; raises InputError if there is nothing to read."""
        self.place = place
        self.settings = settings
        self.skipped = 0
        self.first_skipped = ""
        self._rows: Rows | None = None
        self.files: dict[str, Path] = {}
        self.stats: dict[str, int] = {}  # CRC-32 by `stat_key`, of settled files as last seen
        self._checksums: dict[str, int] = {}  # CRC-32 of all files as last seen, by name
        self.runs: list[str] = []  # folders of runs, whose files are not text of the corpus
        self.others: list[str] = []  # files that are no text by their names
        if place.startswith(("hub:", "tfds:")):
            # A task of one field, by which the readers of examples also read plain text.
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
                yield _of_row(self._rows, i, self.settings)
        for path in self.files.values():
            with reading(path):
                yield from _reader(path)(path, self.settings)

    def fingerprint(self, known: Mapping[str, int]) -> dict[str, list[int]]:
        """Returns [bytes, CRC-32] of each file by its name, or [rows, CRC-32] of a data set.

        `known` has the CRC-32 of files that were read before, by `stat_key`; they are not read
        again.
        """
        if self._rows is not None:
            # Evenly over all rows: reading a whole data set would take as long as indexing it.
            places = range(0, len(self._rows), max(1, len(self._rows) // _SAMPLED))
            rows = [str(_of_row(self._rows, i, self.settings)) for i in places]
            crc = zlib.crc32("\0".join(rows).encode("utf-8", "backslashreplace"))
            return {self.place: [len(self._rows), crc]}
        found = {}
        for name, path in self.files.items():
            with reading(path):
                # Its key tells whether a file is as another store has seen it.
                key, size, is_settled = stat_key(path), path.stat().st_size, _is_settled(path)
                crc = known[key] if key in known else file_checksum(path)
                if is_settled:
                    self.stats[key] = crc
                self._checksums[name] = crc
            found[name] = [size, crc]
        return found

    def check_unmoved(self) -> None:
        """Raises InputError if a file has changed since `fingerprint`."""
        for name, path in self.files.items():
            with reading(path):
                # A file that only got another link or mode has another key, and the same text.
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
    return time.time() - path.stat().st_ctime > _CLOCK


# -- files ----------------------------------------------------------------------------------------


def root_of(place: str) -> Path | None:
    """Returns the folder that contains the files of a place; None for a file, the hub and TFDS."""
    if place.startswith(("hub:", "tfds:")) or os.path.isfile(folder := user_path(place)):
        return None
    parts = folder.parts if not os.path.isdir(folder) else ()
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    return Path(*fixed) if parts else folder


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the contents of a folder, following links; a folder is visited once."""
    seen = {os.path.realpath(folder)}
    for place, inner, names in os.walk(folder, followlinks=True):
        yield from (Path(place, name) for name in names)
        # Folders before links to them.
        found = sorted((os.path.islink(path := os.path.join(place, n)), n, path) for n in inner)
        inner.clear()
        for _, name, path in found:
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                inner.append(name)


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
        found = glob.glob(str(folder), recursive=True)
        by_depth = sorted(map(Path, found), key=lambda path: (len(path.parts), path))
        once = {(os.path.realpath(path.parent), path.name): path for path in reversed(by_depth)}
        paths = [path for path in once.values() if path.is_file()]
        top = Path(os.path.commonpath([path.parent for path in paths])) if paths else folder
    else:
        raise InputError(
            f"corpus {place!r} does not exist; use a folder, a file, a pattern such as "
            "folder/*.jsonl.gz, hub:owner/name or tfds:name"
        )
    root = root_of(place)
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(root).parts)
    paths = [path for path in paths if not hidden(path)]
    texts = [path for path in paths if path.name.endswith(SUFFIXES) and path.is_file()]
    folders = {folder for path in texts for folder in path.parents if root in folder.parents}
    runs = set(filter(is_run, folders))
    texts = [path for path in texts if runs.isdisjoint(path.parents)]
    if not texts:
        there = ", ".join(sorted(path.name for path in paths)[:8]) or "nothing"
        raise InputError(
            f"corpus {place!r} has no file to read ({', '.join(SUFFIXES)}); it has: {there}"
        )
    # Names inside the place: a corpus that is moved keeps its fingerprint.
    names = (user_path(path.relative_to(top), "corpus file").as_posix() for path in texts)
    files = dict(zip(names, texts, strict=True))
    # Their order numbers the documents, so it must not be the file system's.
    read = set(texts)
    others = [p for p in paths if p not in read and runs.isdisjoint(p.parents)]
    return dict(sorted(files.items())), sorted(map(str, runs)), sorted(map(str, others))


def _reader(path: Path) -> Callable[[Path, TextSettings], Iterator[Document]]:
    if path.suffix == ".parquet":
        return _of_parquet
    return _of_text if path.name.endswith((".txt", ".txt.gz")) else _of_json_lines


def _of_text(path: Path, settings: TextSettings) -> Iterator[Document]:
    for line, offset, data in _pieces(path, settings.documents, settings.max_document):
        where = str(path) if settings.documents == "file" else f"{path}:{line}"
        if len(data) > settings.max_document:
            cure = ", or set corpus.documents=line or blank if the file has many"
            yield _too_long(where, settings.max_document, cure)
        else:
            yield _decoded(data, where, offset)


def _of_json_lines(path: Path, settings: TextSettings) -> Iterator[Document]:
    limit = _LINE * settings.max_document
    for line, offset, data in _pieces(path, "line", limit):
        where = f"{path}:{line}"
        if len(data) > limit:
            limit_and_fix = (
                f"{limit:,} bytes, {_LINE} x corpus.max_document; raise corpus.max_document"
            )
            yield InputError(f"{where}: a line of over {limit_and_fix}")
            continue
        text = _decoded(data, where, offset)
        yield text if isinstance(text, InputError) else _parsed(text, where, settings)


def _parsed(line: str, where: str, settings: TextSettings) -> Document:
    try:
        row = parse_json(line)
    except ValueError as error:
        return InputError(f"{where}: broken JSON ({error}); fix or remove this line")
    return _field(row, where, settings)


def _pieces(path: Path, parted: str, limit: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields (line, offset, bytes) of the parts of a file, by DOCUMENTS, except blank ones.

    Parts over `limit` are kept only as far as needed to see that they are.
    """
    number, offset = 1, 0  # of what is read next
    line, start, held, size = 1, 0, [], 0  # of the part at hand
    begins = True  # a line
    with unpacking(path) as file:
        # A chunk is a line, or a part of one that is longer: a file without line ends must not be
        # read at once.
        for chunk in iter(partial(file.readline, _CHUNK), b""):
            ends = chunk.endswith(b"\n")
            if size <= limit:
                held.append(chunk)
            size += len(chunk)
            offset, number = offset + len(chunk), number + ends
            # White space ends a document only as a whole line, not as the rest of a long one.
            if ends and (parted == "line" or (parted == "blank" and begins and not chunk.strip())):
                if not all(map(bytes.isspace, held)):
                    yield line, start, b"".join(held)
                line, start, held, size = number, offset, [], 0
            begins = ends
    if parted != "file" and number == 1 and b"\r" in b"".join(held).strip():
        raise InputError(
            f"{path}: its lines end in a carriage return only; end them with a line feed, e.g. by "
            f"tr '\\r' '\\n' < {path.name}"
        )
    if not all(map(bytes.isspace, held)):
        yield line, start, b"".join(held)


def _decoded(data: bytes, where: str, offset: int) -> Document:
    try:
        # A byte order mark is no text. Not utf-8-sig, whose errors count bytes behind the mark.
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return InputError(
            f"{where}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {offset + error.start} "
            f"of the decompressed file); {utf8_advice(b'' if offset else data)}"
        )


def _of_parquet(path: Path, settings: TextSettings) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_CHUNK) as file:
            names = file.schema_arrow.names
            if settings.field not in names:
                raise _no_field(str(path), settings.field, names)
            if (count := names.count(settings.field)) > 1:
                raise InputError(
                    f"{path}: {count} columns have the name {settings.field!r}; rename all but one"
                )
            row = 0
            # In small batches: a row is a document of any length.
            for batch in file.iter_batches(batch_size=64, columns=[settings.field]):
                # By its name: that of "a.b" also brings the column a that has a field b.
                for value in batch.column(settings.field):
                    row += 1
                    yield _value(value.as_py, f"{path}: row {row}", settings)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: broken Parquet file ({reason}); write it again") from None


# -- rows -----------------------------------------------------------------------------------------


def _of_row(rows: Rows, i: int, settings: TextSettings) -> Document:
    return _value(lambda: rows[i], rows.origin(i), settings)


def _value(get: Callable[[], Any], where: str, settings: TextSettings) -> Document:
    """Reads a value whose reading decodes text: a row, or the field itself."""
    try:
        value = get()
    except UnicodeDecodeError as error:
        return InputError(
            f"{where}: not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start} "
            "of the text); write the data again"
        )
    return _field(value if isinstance(value, dict) else {settings.field: value}, where, settings)


def _field(row: Any, where: str, settings: TextSettings) -> Document:
    """Returns the text of a row."""
    if not isinstance(row, dict):
        return InputError(f"{where}: a row must be an object {{column: value}}, got {row!r:.40}")
    if settings.field not in row:
        return _no_field(where, settings.field, row)
    text = row[settings.field]
    if not isinstance(text, str):
        return InputError(f"{where}: field {settings.field!r} must be a string, got {text!r:.40}")
    try:
        # JSON can write half of a surrogate pair, which only encoding finds.
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        return InputError(
            f"{where}: half a surrogate pair at character {error.start}; fix the escape sequences"
        )
    return text if size <= settings.max_document else _too_long(where, settings.max_document)


def _no_field(where: str, field: str, names: Any) -> InputError:
    return InputError(
        f"{where}: there is no field {field!r}; {nearest(field, map(str, names))}; set corpus.field"
    )


def _too_long(where: str, limit: int, cure: str = "") -> InputError:
    message = f"a document of over {limit:,} bytes; raise corpus.max_document"
    return InputError(f"{where}: {message}{cure}")
