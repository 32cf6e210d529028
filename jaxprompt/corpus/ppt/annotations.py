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
from typing import Any, BinaryIO

import numpy as np

from jaxprompt.corpus import Corpus, check_unchanged
from jaxprompt.corpus.store import check_file, read_meta
from jaxprompt.errors import InputError
from jaxprompt.files import (
    add_checksum,
    make_folder,
    write_atomic,
    write_error,
)

FORMAT = 2
PUBLISHED_THRESHOLDS = (0.95, 0.5, 0.5, 0.5, 0.7)  # released code, worst to best class

_LABELS, _META, _PART = "labels.bin", "meta.json", "part.json"
_DTYPE = np.dtype("<f2")
_BLOCK_UNITS = 2**18  # whose labels are computed at once


class Annotations:
    """Pseudo-labels of every unit of a corpus."""

    def __init__(self, folder: str | os.PathLike):
        """Opens a finished folder; raises InputError if there is none, or it is damaged."""
        self.folder = Path(folder)
        meta = read_meta(self.folder / _META, FORMAT)
        if meta is None:
            raise InputError(
                f"{self.folder} has no annotations, or they are not finished; run annotate"
            )
        path = self.folder / _LABELS
        check_file(path, meta["labels_crc32"])
        self.classes: tuple[str, ...] = tuple(meta["classes"])
        self.annotator: str = meta["annotator"]  # its fingerprint
        self._text_fingerprint = meta["corpus"]
        shape = meta["units"], len(self.classes)
        self.probabilities = np.asarray(np.memmap(path, _DTYPE, "r", shape=shape))  # [units, C]

    def __len__(self) -> int:
        """Number of units."""
        return len(self.probabilities)

    def check(self, corpus: Corpus, classes: int) -> None:
        """Raises InputError if a corpus or a number of classes does not match the labels."""
        if _text_fingerprint(corpus) != self._text_fingerprint or corpus.num_units != len(self):
            raise InputError(
                f"{self.folder} annotates different text ({len(self):,} units) than "
                f"{corpus.folder} ({corpus.num_units:,} units), or text that was divided "
                "differently; annotate this corpus"
            )
        check_classes(self.classes, classes)

    def labels(self, thresholds: Sequence[float] = PUBLISHED_THRESHOLDS) -> np.ndarray:
        """Returns each unit's most probable class if it is above its threshold, else -1. int8"""
        labels = np.empty(len(self), np.int8)
        for start, block in self._label_blocks(thresholds):
            labels[start : start + len(block)] = block
        return labels

    def counts(self, thresholds: Sequence[float]) -> np.ndarray:
        """Counts the units of each label of `labels`. [C]"""
        total = np.zeros(len(self.classes), np.int64)
        for _, block in self._label_blocks(thresholds):
            total += np.bincount(block[block >= 0], minlength=len(total))
        return total

    def _label_blocks(self, thresholds: Sequence[float]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields labels block by block, each with the number of its first unit."""
        check_thresholds(self.classes, thresholds)
        limits = np.array(thresholds, np.float32)
        for start in range(0, len(self), _BLOCK_UNITS):
            block = self.probabilities[start : start + _BLOCK_UNITS].astype(np.float32)
            best = block.argmax(1)
            above = np.take_along_axis(block, best[:, None], 1)[:, 0] > limits[best]
            yield start, np.where(above, best, -1)


def check_thresholds(classes: Sequence[str], thresholds: Sequence[float]) -> None:
    """Raises InputError if there is not one threshold per class."""
    if len(thresholds) != len(classes):
        raise InputError(
            f"ppt.thresholds={', '.join(map(str, thresholds))} must be {len(classes)} numbers, one "
            f"per class ({', '.join(classes)})"
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


class AnnotationWriter:
    """Writes annotations unit by unit; a writer of the same corpus and annotator resumes them.

    If all units are done already, `seal` opens the annotations. One process writes; if several
    annotate, it collects their results.
    """

    def __init__(
        self, folder: str | os.PathLike, corpus: Corpus, classes: Sequence[str], annotator: str
    ):
        """Opens existing annotations, or starts; InputError if corpus or annotator differ."""
        self.folder = make_folder(folder)
        self._job: dict[str, Any] = {  # of the metadata
            "format": FORMAT,
            "classes": list(classes),
            "annotator": annotator,
            "units": corpus.num_units,
            "corpus": _text_fingerprint(corpus),
        }
        self._unit_bytes = len(classes) * _DTYPE.itemsize
        self._file: BinaryIO | None = None
        self.done, self._checksum = corpus.num_units, 0  # done: units
        finished = read_meta(self.folder / _META, FORMAT)
        if finished is not None:
            if self._changed_fields(finished):
                check_unfinished(self.folder)
            return
        path, progress = self.folder / _LABELS, read_meta(self.folder / _PART, FORMAT)
        if progress is None:
            self.done = 0
            with _writing(path):
                self._file = open(path, "wb")  # labels without a part.json are of unknown origin
                self._save_progress(self._file)
            return
        self._check_job(progress)
        self.done, self._checksum = progress["done"], progress["labels_crc32"]
        with _writing(path):
            if path.is_file():
                os.truncate(path, self.done * self._unit_bytes)  # drops labels after the progress
            check_file(path, self._checksum)
            self._file = open(path, "ab")

    def _check_job(self, saved: Mapping[str, Any]) -> None:
        """Raises InputError if the folder was started with another corpus or annotator."""
        # The error of a corpus can name the files that changed.
        if saved["corpus"] != self._job["corpus"]:
            advice = f"delete {self.folder} to annotate again"
            check_unchanged(saved["corpus"], self._job["corpus"], advice)
        elif changed := self._changed_fields(saved):
            raise InputError(
                f"{self.folder} was started with another {changed[0]}; restore it, or delete the "
                "folder to annotate again"
            )

    def _changed_fields(self, saved: Mapping[str, Any]) -> list[str]:
        return [name for name, value in self._job.items() if saved[name] != value]

    def _save_progress(self, file: BinaryIO) -> None:
        """Saves the progress, once the labels are on the disk."""
        os.fsync(file.fileno())
        meta = self._job | {"done": self.done, "labels_crc32": self._checksum}
        write_atomic(self.folder / _PART, json.dumps(add_checksum(meta), indent=1))

    def append(self, probabilities: np.ndarray) -> None:
        """Writes the next units. float [units, C], each row sums to 1 or is zeros"""
        assert self._file is not None
        total = probabilities.sum(1)
        if not (np.isclose(total, 1, atol=1e-2) | (total == 0)).all():  # e.g. NaN
            raise ValueError(f"rows must sum to 1 or 0, one sums to {total[np.argmax(total)]}")
        data = np.ascontiguousarray(probabilities, _DTYPE).data
        with _writing(self.folder):
            self._file.write(data)
            self._file.flush()
            self.done += len(probabilities)
            self._checksum = zlib.crc32(data, self._checksum)
            # So that another process can resume if this one is killed.
            self._save_progress(self._file)

    def seal(self) -> Annotations:
        """Finishes the annotations and opens them."""
        assert self.done == self._job["units"]
        if self._file is not None:
            with _writing(self.folder):
                self._file.close()
                meta = self._job | {"labels_crc32": self._checksum}
                write_atomic(self.folder / _META, json.dumps(add_checksum(meta), indent=1))
                # Last: without both files, the next writer would start again.
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


def _text_fingerprint(corpus: Corpus) -> dict[str, Any]:
    """Returns the fingerprint without the tokenizer, on which unit numbers do not depend."""
    # Via JSON, to compare equal to the saved one.
    return json.loads(json.dumps(dict(corpus.fingerprint, tokenizer="")))
