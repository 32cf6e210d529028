"""Pseudo-labels of a corpus: an annotator's predictions for each unit, in a separate folder.

A folder has labels.bin, the probability of each class, float16 [units, C], and meta.json, written
last: a folder without it is not finished, and has a part.json with the number of units that are
done. Both have the checksum of labels.bin and one of themselves. The numbers of units do not depend
on a tokenizer, so an annotator may use its tokenizer on the same text. A row of zeros is a skipped
unit.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxprompt.corpus import Corpus, check_unchanged
from jaxprompt.errors import InputError
from jaxprompt.files import (
    add_checksum,
    file_checksum,
    make_folder,
    parse_json,
    pop_checksum,
    write_atomic,
    write_error,
)

FORMAT = 2
PUBLISHED = (0.95, 0.5, 0.5, 0.5, 0.7)  # the released code's thresholds, from worst to best

_LABELS, _META, _PART = "labels.bin", "meta.json", "part.json"
_DTYPE = np.dtype("<f2")
_AT_ONCE = 2**18  # rows


class Annotations:
    """Pseudo-labels of every unit of a corpus."""

    def __init__(self, folder: str | os.PathLike):
        """Opens a finished folder; raises InputError if there is none, or it is damaged."""
        self.folder = Path(folder)
        meta = _read(self.folder / _META)
        if meta is None:
            raise InputError(
                f"{self.folder} has no annotations, or they are not finished; run annotate"
            )
        path = self.folder / _LABELS
        _check_labels(path, meta["labels_crc32"])
        self.classes: tuple[str, ...] = tuple(meta["classes"])
        self.annotator: str = meta["annotator"]  # its fingerprint
        self._corpus = meta["corpus"]
        shape = meta["units"], len(self.classes)
        self.probabilities = np.asarray(np.memmap(path, _DTYPE, "r", shape=shape))  # [units, C]

    def __len__(self) -> int:
        """Number of units."""
        return len(self.probabilities)

    def check(self, corpus: Corpus, classes: int) -> None:
        """Raises InputError if a corpus or a number of classes does not match the labels."""
        if _text_of(corpus) != self._corpus or corpus.num_units != len(self):
            raise InputError(
                f"{self.folder} annotates different text ({len(self):,} units) than "
                f"{corpus.folder} ({corpus.num_units:,} units), or text that was divided "
                "differently; annotate this corpus"
            )
        self.check_classes(classes)

    def check_classes(self, classes: int) -> None:
        """Raises InputError if the number of classes is different."""
        check_classes(self.classes, classes)

    def check_thresholds(self, thresholds: Sequence[float]) -> None:
        """Raises InputError if there is not one threshold per class."""
        check_thresholds(self.classes, thresholds)

    def labels(self, thresholds: Sequence[float] = PUBLISHED) -> np.ndarray:
        """Returns each unit's most probable class if it is above its threshold, else -1. int8"""
        found = np.empty(len(self), np.int8)
        for start, part in self._labels(thresholds):
            found[start : start + len(part)] = part
        return found

    def counts(self, thresholds: Sequence[float]) -> np.ndarray:
        """Counts the units of each label of `labels`. [C]"""
        total = np.zeros(len(self.classes), np.int64)
        for _, part in self._labels(thresholds):
            total += np.bincount(part[part >= 0], minlength=len(total))
        return total

    def _labels(self, thresholds: Sequence[float]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields labels part by part, each with the number of its first unit."""
        self.check_thresholds(thresholds)
        limits = np.array(thresholds, np.float32)
        for start in range(0, len(self), _AT_ONCE):
            part = self.probabilities[start : start + _AT_ONCE].astype(np.float32)
            best = part.argmax(1)
            above = np.take_along_axis(part, best[:, None], 1)[:, 0] > limits[best]
            yield start, np.where(above, best, -1)


def check_thresholds(classes: Sequence[str], thresholds: Sequence[float]) -> None:
    """Raises InputError if there is not one threshold per class."""
    if len(thresholds) != len(classes) or not all(0 <= t < 1 for t in thresholds):
        raise InputError(
            f"thresholds {', '.join(map(str, thresholds))} must be {len(classes)} numbers from 0 "
            f"to below 1, one per class ({', '.join(classes)}); set ppt.thresholds"
        )


def check_classes(classes: Sequence[str], words: int) -> None:
    """Raises InputError if the classes do not match the label words."""
    if len(classes) != words:
        raise InputError(
            f"the annotator has {len(classes)} classes ({', '.join(classes)}), but ppt.task=cls "
            f"has {words} label words; use a task of {words} classes, from the worst to the best"
        )


def check_unfinished(folder: str | os.PathLike) -> None:
    """Raises InputError if the annotations of a folder are finished."""
    if (Path(folder) / _META).exists():
        raise InputError(f"{folder} already has finished annotations; use another folder")


class _Work(NamedTuple):
    """What is annotated by what, as the metadata has it."""

    format: int
    classes: list[str]
    annotator: str
    units: int
    corpus: dict[str, Any]  # its fingerprint without the tokenizer


class AnnotationWriter:
    """Writes annotations unit by unit; a writer of the same work resumes where one stopped.

    If all units are done already, `seal` opens the annotations. One process writes; if several
    annotate, it collects their results.
    """

    def __init__(
        self, folder: str | os.PathLike, corpus: Corpus, classes: Sequence[str], annotator: str
    ):
        """Opens existing work, or starts; InputError if corpus or annotator differ."""
        self.folder = make_folder(folder)
        self._work = _Work(FORMAT, list(classes), annotator, corpus.num_units, _text_of(corpus))
        self._row = len(classes) * _DTYPE.itemsize
        self._file: BinaryIO | None = None
        self.done, self._checksum = corpus.num_units, 0  # done: units
        finished = _read(self.folder / _META)
        if finished is not None:
            if self._changed(finished):
                check_unfinished(self.folder)
            return
        path, begun = self.folder / _LABELS, _read(self.folder / _PART)
        if begun is None:
            self.done = 0
            with _writing(path):
                self._file = open(path, "wb")  # rows without a part.json are of unknown origin
                self._note(self._file)
            return
        self._check_work(begun)
        self.done, self._checksum = begun["done"], begun["labels_crc32"]
        with _writing(path):
            if path.is_file():
                os.truncate(path, self.done * self._row)  # rows that were not noted
            _check_labels(path, self._checksum)
            self._file = open(path, "ab")

    def _check_work(self, begun: Mapping[str, Any]) -> None:
        """Raises InputError where the folder was started by a run with other settings."""
        # Told apart from the other fields, because its error can name the files that changed.
        if begun["corpus"] != self._work.corpus:
            advice = f"delete {self.folder} to annotate again"
            check_unchanged(begun["corpus"], self._work.corpus, advice)
        elif changed := self._changed(begun):
            raise InputError(
                f"{self.folder} was started with another {changed[0]}; restore it, or delete the "
                "folder to annotate again"
            )

    def _changed(self, saved: Mapping[str, Any]) -> list[str]:
        """Lists the fields in which other work differs."""
        return [name for name, value in self._work._asdict().items() if saved[name] != value]

    def _note(self, file: BinaryIO) -> None:
        """Saves the progress, once the rows are on the disk."""
        os.fsync(file.fileno())
        about = self._work._asdict() | {"done": self.done, "labels_crc32": self._checksum}
        write_atomic(self.folder / _PART, json.dumps(add_checksum(about), indent=1))

    def append(self, probabilities: np.ndarray) -> None:
        """Writes the next units. float [units, C], each row sums to 1 or is zeros"""
        total = probabilities.sum(1)
        if not (np.isclose(total, 1, atol=1e-2) | (total == 0)).all():
            raise ValueError(f"rows must sum to 1 or 0, one sums to {total[np.argmax(total)]}")
        if self._file is None or self.done + len(probabilities) > self._work.units:
            raise ValueError(f"more than the {self._work.units} units of the corpus")
        data = np.ascontiguousarray(probabilities, _DTYPE).data
        with _writing(self.folder):
            self._file.write(data)
            self._file.flush()
            self.done += len(probabilities)
            self._checksum = zlib.crc32(data, self._checksum)
            # What a process that is killed has appended is there for the one that goes on.
            self._note(self._file)

    def seal(self) -> Annotations:
        """Finishes the work and opens it."""
        if self.done != self._work.units:
            raise ValueError(f"{self.done} of {self._work.units} units are annotated")
        if self._file is None:
            return Annotations(self.folder)
        with _writing(self.folder):
            self._file.close()
            about = self._work._asdict() | {"labels_crc32": self._checksum}
            write_atomic(self.folder / _META, json.dumps(add_checksum(about), indent=1))
            # Last: with neither of the two files, the next writer would begin anew.
            (self.folder / _PART).unlink()
        return Annotations(self.folder)

    def close(self) -> None:
        """Closes the file, sealed or not."""
        if self._file is not None:
            with _writing(self.folder):
                self._file.close()


@contextlib.contextmanager
def _writing(path: Path):
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def _text_of(corpus: Corpus) -> dict[str, Any]:
    """What the numbers of units depend on: all of a fingerprint but the tokenizer."""
    # Through JSON, as it will be read back.
    return json.loads(json.dumps(dict(corpus.fingerprint, tokenizer="")))


def _check_labels(path: Path, checksum: int) -> None:
    """Raises InputError where the labels do not match their checksum."""
    try:
        is_whole = file_checksum(path) == checksum
    except OSError:
        is_whole = False
    if not is_whole:
        raise _damage_error(path)


def _read(path: Path) -> dict[str, Any] | None:
    """Reads the metadata of the labels; None if absent. Raises InputError if damaged."""
    try:
        about = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damage_error(path) from error
    if not isinstance(about, dict) or not pop_checksum(about) or about.get("format") != FORMAT:
        raise _damage_error(path)
    return about


def _damage_error(path: Path) -> InputError:
    return InputError(
        f"{path} is damaged, or from another version of jaxprompt; delete {path.parent}, and run "
        "annotate again"
    )
