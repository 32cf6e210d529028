"""Few-shot protocols: pure functions from labels and a seed to row numbers of the train split.

All sample with numpy's legacy RandomState or `random.Random`, whose streams never change: the same
seed gives the same rows on every machine and for any number of processes.
"""

import dataclasses
import itertools
import logging
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxprompt.config.run import Balanced, Fraction, HoldOut, KFold, KShot, Listed, Protocol
from jaxprompt.data.sampling.listed_rows import read_listed
from jaxprompt.errors import InputError, at_least

_Key = TypeVar("_Key", bound=Hashable)
_LOG = logging.getLogger(__name__)
_OR_USE_FEWER = ", or set data.protocol.on_shortage=use_fewer"
ON_SHORTAGE = ("raise", "use_fewer")  # of a class with fewer rows than kshot asks for


class SplitRows(NamedTuple):
    """Row numbers, int64. With dev = None, the dev rows are the task's dev split."""

    train: np.ndarray
    dev: np.ndarray | None


def sample_split(
    protocol: Protocol,
    labels: Sequence[int],
    seed: int,
    names: Sequence[str] = (),
    groups: Sequence[Hashable] | None = None,
    rows: tuple[Sequence[int], int] | None = None,
) -> SplitRows:
    """Samples a split by a protocol.

    Rows of one of `groups` stay together under holdout, fraction and kfold without k. These then
    count groups instead of classes; the size of holdout is the minimum number of rows in dev. kshot
    and balanced sample train by class; their dev is made of whole groups that train has no example
    of, until it has at least as many examples as sampled.

    Args:
      protocol: any protocol but the one that takes all examples.
      labels: class of each example.
      seed: seed of the sampling.
      names: class names, for messages.
      groups: group of each example, e.g. its question.
      rows: for `Listed`: the row of each label, and the number of rows; by default each label is
        one row.
    """
    if groups is not None and keeps_groups(protocol):
        return _by_group(protocol, groups, seed)
    if isinstance(protocol, HoldOut):
        return holdout(labels, protocol.size, seed)
    if isinstance(protocol, Listed):
        numbers, total = rows or (None, len(labels))
        return _split_rows(*read_listed(protocol.rows, seed, total, numbers))
    if isinstance(protocol, KFold):
        folds, k, shortage = protocol.folds, protocol.k or None, protocol.on_shortage
        parts = kfold(labels, folds, seed, k=k, names=names, on_shortage=shortage)
        if protocol.fold >= folds:
            raise InputError(
                f"data.protocol.fold={protocol.fold} is out of range; folds count from 0 to "
                f"{folds - 1}"
            )
        return parts[protocol.fold]
    if isinstance(protocol, KShot):
        k, dev_k = protocol.k, protocol.dev_k or None
        sampled = kshot(labels, k, seed, dev_k=dev_k, names=names, on_shortage=protocol.on_shortage)
    elif isinstance(protocol, Balanced):
        sampled = balanced(labels, protocol.n, seed, names=names)
    else:
        assert isinstance(protocol, Fraction)
        sampled = fraction(labels, protocol.ratio, seed, holdout=protocol.holdout, names=names)
    return sampled if groups is None else _with_grouped_dev(sampled, groups, seed)


def keeps_groups(protocol: Protocol) -> bool:
    """Returns whether a protocol can keep groups together: not if it takes a number per class."""
    return isinstance(protocol, HoldOut | Fraction) or (
        isinstance(protocol, KFold) and not protocol.k
    )


def _by_group(protocol: Protocol, groups: Sequence[Hashable], seed: int) -> SplitRows:
    rows, needed = list(_rows_by_key(groups, range(len(groups))).values()), 2
    if isinstance(protocol, HoldOut):
        sizes = np.cumsum([len(rows[group]) for group in _shuffled(len(rows), seed)])
        size = int(np.searchsorted(sizes, protocol.size)) + 1
        protocol, needed = dataclasses.replace(protocol, size=size), size + 1
    elif isinstance(protocol, KFold):
        needed = protocol.folds
    if len(rows) < needed:
        raise InputError(
            f"the {len(groups)} training examples belong to only {len(rows)} questions or "
            f"sentences, which data.protocol={protocol.name} does not divide, too few for train "
            "and dev; reduce data.protocol.size or data.protocol.folds, or set data.files.dev"
        )
    train, dev = sample_split(protocol, [0] * len(rows), seed, names=("all",))

    def rows_in(chosen: Iterable[int]) -> list[int]:
        return [row for group in chosen for row in rows[group]]

    return _split_rows(rows_in(train), None if dev is None else rows_in(dev))


def _with_grouped_dev(sampled: SplitRows, groups: Sequence[Hashable], seed: int) -> SplitRows:
    if sampled.dev is None or not len(sampled.dev):
        return sampled
    train_groups = {groups[row] for row in sampled.train}
    remaining = [row for row in range(len(groups)) if groups[row] not in train_groups]
    rows = list(_rows_by_key(groups, remaining).values())
    dev: list[int] = []
    for group in _shuffled(len(rows), seed):
        dev += rows[group] if len(dev) < len(sampled.dev) else []
    if not dev:
        raise InputError(
            "train has examples of every question, which leaves none for dev; sample fewer, or "
            "set data.files.dev"
        )
    return sampled._replace(dev=np.array(sorted(dev), np.int64))


def kshot(
    labels: Sequence[int],
    k: int,
    seed: int,
    dev_k: int | None = None,
    names: Sequence[str] = (),
    on_shortage: str = "raise",
) -> SplitRows:
    """Samples K rows per class for train, `dev_k` (default K) for dev (LM-BFF, Gao et al. 2021).

    The rows are shuffled once; classes are in the order of their first row after the shuffle, and
    the rows of a class keep the shuffled order. If a class has fewer rows, or a class of `names`
    has none, on_shortage="use_fewer" gives train what there is, up to K, and dev the rest, with a
    warning; "raise" is an error.
    """
    dev_k = k if dev_k is None else dev_k
    at_least("data.protocol.k", k, 1)
    groups = _with_absent(_rows_by_key(labels, _shuffled(len(labels), seed)), names)
    if on_shortage == "raise":
        request = f"data.protocol.k={k} and {dev_k} for dev"
        _check_counts(groups, k + dev_k, request, names, _OR_USE_FEWER)
    for label, rows in groups.items():
        if len(rows) < k + dev_k:
            _warn_of_shortage(label, names, len(rows), len(rows[:k]), len(rows[k:]))
    train = [row for rows in groups.values() for row in rows[:k]]
    return _split_rows(train, [row for rows in groups.values() for row in rows[k : k + dev_k]])


def balanced(labels: Sequence[int], n: int, seed: int, names: Sequence[str] = ()) -> SplitRows:
    """Samples N examples in total for train and N for dev, spread evenly over the classes (PPT).

    With more than 5 classes it takes 8 examples per class instead (Gu et al. 2022, section 4.1).
    The remainder of N goes to the classes that come first after the shuffle, one example each. A
    class with too few examples gives half of them to train and half to dev, with a warning, like
    the 16 neutral examples of CB's training split; a class of `names` with fewer than 2 is an
    error.
    """
    groups = _rows_by_key(labels, _shuffled(len(labels), seed))
    request = "one example for train and one for dev"
    _check_counts(_with_absent(groups, names), 2, request, names)
    if len(groups) > 5:
        n = 8 * len(groups)
    at_least("data.protocol.n", n, len(groups))
    train: list[int] = []
    dev: list[int] = []
    for position, (label, rows) in enumerate(groups.items()):
        share = n // len(groups) + (position < n % len(groups))
        if len(rows) < 2 * share:
            share = len(rows) // 2
            _warn_of_shortage(label, names, len(rows), share, share)
        train += rows[:share]
        dev += rows[share : 2 * share]
    return _split_rows(train, dev)


def fraction(
    labels: Sequence[int],
    ratio: float,
    seed: int = 0,
    holdout: float = 0.0,
    names: Sequence[str] = (),
) -> SplitRows:
    """Samples a share of every class, at least 1 row, in file order (DPT, low-resource).

    These are the rows of DPT's released `_sample_with_cls_ratio`: one generator, seeded once,
    shuffles class after class, in the order of each class's first row. A class without a row is
    skipped. A ratio of 2 or more is a number of rows per class. dev is None, or with `holdout` in
    (0, 1) that share of every class, at least 1 row, sampled from the remaining rows.
    """
    if not 0 < ratio <= 1 and not (ratio >= 2 and ratio == int(ratio)):
        raise InputError(
            f"data.protocol.ratio={ratio} is invalid; give a share in (0, 1], or a number of "
            "examples per class: 2, 3, ..."
        )
    request = f"data.protocol.ratio={ratio} with data.protocol.holdout={holdout}"
    train: list[int] = []
    dev: list[int] = []
    generator = random.Random(seed)  # each class continues its stream, as released
    for label, rows in _rows_by_key(labels, range(len(labels))).items():
        num_train = int(ratio) if ratio >= 2 else max(1, int(ratio * len(rows)))
        num_dev = max(1, int(holdout * len(rows))) if holdout else 0
        _check_counts({label: rows}, num_train + num_dev, request, names)
        generator.shuffle(rows)
        train += rows[:num_train]
        dev += rows[num_train : num_train + num_dev]
    return _split_rows(sorted(train), sorted(dev) if holdout else None)


def kfold(
    labels: Sequence[int],
    folds: int,
    seed: int,
    k: int | None = None,
    names: Sequence[str] = (),
    on_shortage: str = "raise",
) -> list[SplitRows]:
    """Divides the rows into `folds` parts, stratified by class; each part is dev once (IPT).

    With `k` it divides only K rows per class, those of `kshot`: with 2K, its train and dev
    together. If a class has fewer rows, or a class of `names` has none, on_shortage="use_fewer"
    divides what there is; "raise" is an error. Rows are in file order. Raises InputError for a
    class with fewer rows than folds, unless it has none.
    """
    at_least("data.protocol.folds", folds, 2)
    groups = _rows_by_key(labels, _shuffled(len(labels), seed))
    if k is not None and on_shortage == "raise":
        all_groups = _with_absent(groups, names)
        _check_counts(all_groups, k, f"data.protocol.k={k}", names, _OR_USE_FEWER)
    groups = {label: rows[:k] for label, rows in groups.items()}
    request = f"data.protocol.folds={folds} (one example in each)"
    _check_counts(groups, folds, request, names)
    rows_in_order = np.array([row for rows in groups.values() for row in rows], np.int64)
    # Dealt like cards, class after class, so that each part gets its share of every class.
    parts = [np.sort(rows_in_order[fold::folds]) for fold in range(folds)]
    return [
        SplitRows(np.sort(np.concatenate(parts[:fold] + parts[fold + 1 :])), parts[fold])
        for fold in range(folds)
    ]


def holdout(labels: Sequence[int], size: int, seed: int) -> SplitRows:
    """Samples `size` random rows of train for dev and leaves the rest for train, in file order.

    Every class gives its share of `size`, rounded by largest remainders, and keeps a row in train.
    Without classes, all labels are equal.
    """
    total = len(labels)
    groups = _rows_by_key(labels, _shuffled(total, seed))
    if size > total - len(groups):
        raise InputError(
            f"data.protocol.size={size} leaves none of a class for train: there are {total} "
            f"examples of {len(groups)} classes, so dev can have {total - len(groups)}; use a "
            "smaller size, set data.files.dev, or, if these are too many classes, check task.label"
        )
    shares = _shares({label: len(rows) for label, rows in groups.items()}, size)
    dev = [row for label, rows in groups.items() for row in rows[: shares[label]]]
    train = [row for label, rows in groups.items() for row in rows[shares[label] :]]
    return _split_rows(sorted(train), sorted(dev))


def _shuffled(count: int, seed: int) -> list[int]:
    rows = list(range(count))
    # A seeded shuffle of the list, as in LM-BFF's generate_k_shot_data.py.
    np.random.RandomState(seed).shuffle(rows)
    return rows


def _rows_by_key(keys: Sequence[_Key], order: Iterable[int]) -> dict[_Key, list[int]]:
    """Lists the rows of each class or group, in the order of the first row of each."""
    rows_by_key: dict[_Key, list[int]] = {}
    for row in order:
        rows_by_key.setdefault(keys[row], []).append(row)
    return rows_by_key


def _with_absent(groups: dict[int, list[int]], names: Sequence[str]) -> dict[int, list[int]]:
    """Adds the classes of `names` that have no row, after the others."""
    return groups | {label: [] for label in range(len(names)) if label not in groups}


def _shares(sizes: Mapping[int, int], size: int) -> dict[int, int]:
    """Divides `size` over classes in proportion to their sizes; each keeps at least one row."""
    total = sum(sizes.values())
    shares = {label: size * count // total for label, count in sizes.items()}
    by_remainder = sorted(sizes, key=lambda label: -(size * sizes[label] % total))
    # This ends: `size` is at most what the classes can give with a row left in each.
    turns = itertools.cycle(by_remainder)
    while sum(shares.values()) != size:
        label = next(turns)
        shares[label] += shares[label] < sizes[label] - 1
    return shares


def _split_rows(train: Sequence[int], dev: Sequence[int] | None) -> SplitRows:
    return SplitRows(np.array(train, np.int64), None if dev is None else np.array(dev, np.int64))


def _check_counts(
    groups: Mapping[int, list[int]],
    need: int,
    request: str,
    names: Sequence[str],
    advice: str = "",
) -> None:
    for label, rows in groups.items():
        if len(rows) < need:
            raise InputError(
                f"class {_name(label, names)} has {len(rows)} examples, but {request} needs "
                f"{need}; reduce the number, or add examples{advice}"
            )


def _warn_of_shortage(label: int, names: Sequence[str], count: int, train: int, dev: int) -> None:
    _LOG.warning(
        "class %s has only %d examples: train gets %d of them, dev %d",
        _name(label, names),
        count,
        train,
        dev,
    )


def _name(label: int, names: Sequence[str]) -> str:
    return repr(names[label]) if names else str(label)
