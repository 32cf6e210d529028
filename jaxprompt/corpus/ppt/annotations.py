"""Pseudo-labels of a corpus: what an annotator holds of each unit, in a file beside the corpus.

A folder has labels.bin, the probability of each class, float16 [units, C], and meta.json, written
last: a folder without it is not finished. The numbers of units do not depend on a tokenizer, so an
annotator may read the same text through its own. A row of zeros is a unit that it left out.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxprompt.corpus import Corpus, check_unchanged
from jaxprompt.errors import InputError
from jaxprompt.files import make_folder, parse_json, write_atomic, write_error

FORMAT = 1
PUBLISHED = (0.95, 0.5, 0.5, 0.5, 0.7)  # the released code's thresholds, from worst to best

_LABELS, _META, _PART = "labels.bin", "meta.json", "part.json"
_DTYPE = np.dtype("<f2")
_AT_ONCE = 2**18  # rows


class Annotations:
    """Pseudo-labels of every unit of a corpus."""

    def __init__(self, folder: str | os.PathLike):
        """Opens a finished folder; raises InputError where there is none, or a damaged one."""
        self.folder = Path(folder)
        meta = _read(self.folder / _META)
        if meta is None:
            raise InputError(f"{self.folder}: no annotations there, or not finished; run annotate")
        self.classes: tuple[str, ...] = tuple(meta["classes"])
        self.annotator: str = meta["annotator"]  # its fingerprint
        self._corpus = meta["corpus"]
        path, shape = self.folder / _LABELS, (meta["units"], len(self.classes))
        wanted = shape[0] * shape[1] * _DTYPE.itemsize
        there = path.stat().st_size if path.is_file() else 0
        if there != wanted:
            raise InputError(
                f"{path}: has {there} bytes, not {wanted}; delete the folder, annotate anew"
            )
        self.probabilities = np.asarray(np.memmap(path, _DTYPE, "r", shape=shape))  # [units, C]

    def __len__(self) -> int:
        """Number of units."""
        return len(self.probabilities)

    def check(self, corpus: Corpus, classes: int) -> None:
        """Raises InputError where a corpus or a number of classes is not that of the labels."""
        if _text_of(corpus) != self._corpus or corpus.num_units != len(self):
            raise InputError(
                f"{self.folder} annotates other text ({len(self):,} units) than {corpus.folder} "
                f"({corpus.num_units:,}), or divided otherwise; annotate this corpus"
            )
        self.check_classes(classes)

    def check_classes(self, classes: int) -> None:
        """Raises InputError where there are other than so many classes."""
        check_classes(self.classes, classes)

    def check_thresholds(self, thresholds: Sequence[float]) -> None:
        """Raises InputError where they are not one for each class."""
        check_thresholds(self.classes, thresholds)

    def labels(self, thresholds: Sequence[float] = PUBLISHED) -> np.ndarray:
        """Gives each unit its likeliest class if that is above its threshold, else -1. int8"""
        found = np.empty(len(self), np.int8)
        for start, part in self._labels(thresholds):
            found[start : start + len(part)] = part
        return found

    def counts(self, thresholds: Sequence[float]) -> np.ndarray:
        """Counts the units of each label, as `labels` gives them. [C]"""
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
    """Raises InputError where there is not one threshold for each class."""
    if len(thresholds) != len(classes) or not all(0 <= t < 1 for t in thresholds):
        raise InputError(
            f"thresholds {', '.join(map(str, thresholds))} must be {len(classes)} numbers from 0 "
            f"to below 1, one for each of {', '.join(classes)}; set ppt.thresholds"
        )


def check_classes(classes: Sequence[str], words: int) -> None:
    """Raises InputError where there are other classes than label words."""
    if len(classes) != words:
        raise InputError(
            f"the annotator has {len(classes)} classes ({', '.join(classes)}), and ppt.task=cls "
            f"has {words} label words; take a task of {words} classes, from the worst to the best"
        )


def check_unfinished(folder: str | os.PathLike) -> None:
    """Raises InputError where a folder has all of its annotations."""
    if (Path(folder) / _META).exists():
        raise InputError(f"{folder} has finished annotations; take another folder")


class AnnotationWriter:
    """Writes annotations unit after unit; a writer of the same work goes on where one ended.

    Where that was at the end of all units nothing is left to do, and `seal` opens what is there.
    One process writes; where several annotate, it gathers what they found.
    """

    def __init__(
        self, folder: str | os.PathLike, corpus: Corpus, classes: Sequence[str], annotator: str
    ):
        """Opens what is there, or begins; InputError where it is of another corpus or annotator."""
        self.folder = make_folder(folder)
        work = {
            "format": FORMAT, "classes": list(classes), "annotator": annotator,
            "units": corpus.num_units, "corpus": _text_of(corpus),
        }  # fmt: skip
        self._work, self._row = work, len(classes) * _DTYPE.itemsize
        self._file, self.done = None, corpus.num_units  # units
        if (finished := _read(self.folder / _META)) == work:
            return
        if finished is not None:
            check_unfinished(self.folder)
        begun = _read(self.folder / _PART)
        if begun is None:
            write_atomic(self.folder / _PART, json.dumps(work, indent=1))
        # Told apart from the other fields, because its error can name the files that changed.
        elif begun["corpus"] != work["corpus"]:
            cure = f"delete {self.folder} to annotate anew"
            check_unchanged(begun["corpus"], work["corpus"], cure)
        elif changed := [name for name in work if begun.get(name) != work[name]]:
            raise InputError(
                f"{self.folder} was begun with another {changed[0]}; restore it, or delete the "
                "folder to annotate anew"
            )
        path = self.folder / _LABELS
        with _writing(path):
            # Rows without a part.json are of unknown origin: they are overwritten.
            self._file = open(path, "ab" if begun else "wb")
            # Opened to append, a file is at its end.
            self.done = self._file.tell() // self._row
            self._file.truncate(self.done * self._row)  # a row may have been cut by the end

    def append(self, probabilities: np.ndarray) -> None:
        """Writes the next units. float [units, C], each row sums to 1 or is zeros"""
        total = probabilities.sum(1)
        if not (np.isclose(total, 1, atol=1e-2) | (total == 0)).all():
            raise ValueError(f"rows must sum to 1 or 0, one sums to {total[np.argmax(total)]}")
        if self.done + len(probabilities) > self._work["units"]:
            raise ValueError(f"more than the {self._work['units']} units of the corpus")
        with _writing(self.folder):
            self._file.write(np.ascontiguousarray(probabilities, _DTYPE).data)
            # What a process that is killed has appended is there for the one that goes on.
            self._file.flush()
        self.done += len(probabilities)

    def seal(self) -> Annotations:
        """Ends the work and opens it."""
        if self.done != self._work["units"]:
            raise ValueError(f"{self.done} of {self._work['units']} units are annotated")
        if self._file is None:
            return Annotations(self.folder)
        with _writing(self.folder):
            # The rows reach the disk before the file that vouches for them.
            os.fsync(self._file.fileno())
            self._file.close()
            write_atomic(self.folder / _META, json.dumps(self._work, indent=1))
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


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None
