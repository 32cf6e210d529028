"""Few-shot protocols against splits written out by hand and against independent code."""

import collections
import json
import random
import re

import numpy as np
import pytest

from jaxprompt.config.open_blocks import CHOICES
from jaxprompt.config.run import Balanced, Fraction, HoldOut, KFold, KShot, Listed
from jaxprompt.data.sampling import fewshot
from jaxprompt.errors import InputError

# RandomState(0).shuffle of rows 0..9 gives 2 8 4 9 1 6 7 3 0 5
TEN = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
UNEVEN = [i % 3 for i in range(40)] + [0] * 11


def lm_bff(labels, k, seed):
    """The order of the published sampler: numpy's global stream over the list of lines."""
    np.random.seed(seed)
    lines = list(enumerate(labels))
    np.random.shuffle(lines)
    lists = {}
    for row, label in lines:
        lists.setdefault(label, []).append(row)
    train = [row for label in lists for row in lists[label][:k]]
    return train, [row for label in lists for row in lists[label][k : 2 * k]]


@pytest.mark.parametrize("seed", [13, 21, 42, 87, 100])
def test_kshot_is_the_order_of_lm_bff(seed):
    split = fewshot.kshot(UNEVEN, 5, seed)
    assert (split.train.tolist(), split.dev.tolist()) == lm_bff(UNEVEN, 5, seed)
    assert split.train.dtype == np.int64


def test_kshot_dev_k():
    split = fewshot.kshot(TEN, 1, seed=0, dev_k=3)
    assert split.train.tolist() == [2, 9]
    assert split.dev.tolist() == [8, 4, 6, 1, 7, 3]
    assert fewshot.kshot(TEN, 5, seed=0, dev_k=0).dev.tolist() == []


def test_kshot_leaves_the_global_stream_alone():
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    fewshot.kshot(UNEVEN, 2, seed=1)
    assert np.random.rand() == expected


def test_balanced_golden():
    split = fewshot.balanced(TEN, 4, seed=0)
    assert split.train.tolist() == [2, 8, 9, 1]
    assert split.dev.tolist() == [4, 6, 7, 3]


def test_balanced_spreads_the_remainder():
    split = fewshot.balanced(UNEVEN, 8, seed=3)
    first = [UNEVEN[row] for row in lm_bff(UNEVEN, 1, 3)[0]]
    counts = collections.Counter(UNEVEN[row] for row in split.train)
    assert [counts[label] for label in first] == [3, 3, 2]
    assert counts == collections.Counter(UNEVEN[row] for row in split.dev)
    assert not set(split.train) & set(split.dev)


def test_a_scarce_class_gives_half_to_train_and_half_to_dev(caplog):
    """The class counts of CB's training split (de Marneffe et al. 2019): 16 neutral of 250."""
    names, sizes = ("entailment", "contradiction", "neutral"), (115, 119, 16)
    labels = np.repeat([0, 1, 2], sizes)
    split = fewshot.balanced(labels, 32, seed=10, names=names)
    shares = collections.Counter(labels[split.train])
    assert shares == collections.Counter(labels[split.dev]) and shares[2] == 8
    assert sorted(shares[label] for label in (0, 1)) in ([10, 11], [11, 11])
    assert not set(split.train) & set(split.dev)
    (message,) = caplog.messages
    assert message == "class 'neutral' has only 16 examples: train gets 8 of them, dev 8"
    assert len(fewshot.balanced(labels, 256, seed=0).train) == 57 + 59 + 8
    odd = fewshot.balanced([0] * 9 + [1] * 3, 8, seed=0)
    assert [len(part) for part in odd] == [4 + 1, 4 + 1]


def test_balanced_takes_8_a_class_above_5_classes():
    labels = [i % 6 for i in range(120)]
    split = fewshot.balanced(labels, 32, seed=0)
    for rows in split:
        assert collections.Counter(labels[row] for row in rows) == dict.fromkeys(range(6), 8)
    assert len(fewshot.balanced([i % 5 for i in range(120)], 32, seed=0).train) == 32


def released_share(labels, ratio, holdout, seed):
    """DPT's sampler, restated: all classes are shuffled by one stream, which is seeded once.

    It rounds down, to 1 at least. Returns train and, which DPT does not have, the rows that follow
    it in each class.
    """
    random.seed(seed)
    train, dev = [], []
    for label in dict.fromkeys(labels):  # in the order of the file
        rows = [row for row, x in enumerate(labels) if x == label]
        random.shuffle(rows)
        end = max(1, int(ratio * len(rows)))
        train += rows[:end]
        dev += rows[end : end + max(1, int(holdout * len(rows)))] if holdout else []
    return sorted(train), sorted(dev)


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_fraction_is_the_released_sample(seed):
    # Class 2 comes first in the file, so it is shuffled first; a tenth of class 3 is below 1.
    labels = [2] * 10 + UNEVEN + [3] * 9
    for ratio, holdout in ((0.1, 0.0), (0.25, 0.2), (0.7, 0.1)):
        protocol = Fraction(ratio=ratio, holdout=holdout)
        train, dev = fewshot.sample_split(protocol, labels, seed)
        expected = released_share(labels, ratio, holdout, seed)
        assert (train.tolist(), [] if dev is None else dev.tolist()) == expected
        assert (dev is None) == (not holdout)


def test_fraction_counts_and_holdout():
    split = fewshot.fraction(UNEVEN, 4, seed=7, holdout=0.2)
    assert collections.Counter(UNEVEN[row] for row in split.train) == {0: 4, 1: 4, 2: 4}
    assert collections.Counter(UNEVEN[row] for row in split.dev) == {0: 5, 1: 2, 2: 2}
    assert not set(split.train) & set(split.dev)
    assert collections.Counter(UNEVEN[row] for row in fewshot.fraction(UNEVEN, 2).train) == {
        0: 2, 1: 2, 2: 2
    }  # fmt: skip
    assert fewshot.fraction(UNEVEN, 1).train.tolist() == list(range(len(UNEVEN)))


def test_kfold_partitions_and_keeps_the_classes():
    folds = fewshot.kfold(UNEVEN, 4, seed=1)
    assert sorted(row for fold in folds for row in fold.dev) == list(range(len(UNEVEN)))
    for fold in folds:
        assert sorted([*fold.train, *fold.dev]) == list(range(len(UNEVEN)))
        counts = collections.Counter(UNEVEN[row] for row in fold.dev)
        assert counts[0] in (6, 7) and counts[1] in (3, 4) and counts[2] in (3, 4)


def test_kfold_golden():
    # class 0 comes first: 2 8 4 6 0, then 9 1 7 3 5, dealt to two parts in turn
    first, second = fewshot.kfold(TEN, 2, seed=0)
    assert first.dev.tolist() == second.train.tolist() == [0, 1, 2, 3, 4]
    assert second.dev.tolist() == first.train.tolist() == [5, 6, 7, 8, 9]


def test_kfold_of_2k_rows_is_what_kshot_divides():
    """So hyper-parameters are chosen on the very examples that then train and stop early."""
    sampled = np.concatenate(fewshot.kshot(UNEVEN, 4, seed=5))
    for fold in fewshot.kfold(UNEVEN, 4, seed=5, k=8):
        assert sorted([*fold.train, *fold.dev]) == sorted(sampled)
    other = fewshot.kfold(UNEVEN, 4, seed=6, k=8)[0]
    assert other.dev.tolist() != fewshot.kfold(UNEVEN, 4, seed=5, k=8)[0].dev.tolist()


def test_kfold_of_a_scarce_class():
    """The class counts of CB's training split: 16 neutral examples, 4 a fold."""
    labels = np.repeat([0, 1, 2], (115, 119, 16))
    with pytest.raises(InputError, match="class 'neutral' has 16 .*data.protocol.k=64 needs 64"):
        fewshot.kfold(labels, 4, seed=0, k=64, names=("yes", "no", "neutral"))
    folds = fewshot.kfold(labels, 4, seed=0, k=64, on_shortage="use_fewer")
    for fold in folds:
        assert collections.Counter(labels[fold.dev]) == {0: 16, 1: 16, 2: 4}
        assert collections.Counter(labels[fold.train]) == {0: 48, 1: 48, 2: 12}


def test_holdout_golden():
    split = fewshot.holdout([0] * 10, 3, seed=0)  # no classes: the first of the shuffle
    assert split.dev.tolist() == [2, 4, 8]
    assert split.train.tolist() == [0, 1, 3, 5, 6, 7, 9]
    split = fewshot.holdout(TEN, 4, seed=0)  # the first two of each class
    assert split.dev.tolist() == [1, 2, 8, 9]


@pytest.mark.parametrize("seed", range(20))
def test_holdout_gives_every_class_its_share(seed):
    labels = [0] * 60 + [1] * 30 + [2] * 10
    split = fewshot.holdout(labels, 20, seed)
    assert collections.Counter(labels[row] for row in split.dev) == {0: 12, 1: 6, 2: 2}
    assert sorted([*split.train, *split.dev]) == list(range(100))
    assert split.train.tolist() == sorted(split.train) and split.dev.tolist() == sorted(split.dev)
    scarce = [0] * 126 + [1]  # the only example of a class stays in train
    split = fewshot.holdout(scarce, 12, seed)
    assert collections.Counter(scarce[row] for row in split.train) == {0: 114, 1: 1}
    most = fewshot.holdout(labels, 97, seed)  # and so does the last of each
    assert collections.Counter(labels[row] for row in most.train) == {0: 1, 1: 1, 2: 1}


def test_holdout_draws_by_the_seed_within_a_class():
    labels = [0] * 60 + [1] * 30
    splits = {tuple(fewshot.holdout(labels, 9, seed).dev) for seed in range(5)}
    assert len(splits) == 5
    assert fewshot.holdout(labels, 9, 3).dev.tolist() == fewshot.holdout(labels, 9, 3).dev.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_holdout_rounds_by_largest_remainders(seed):
    """Shares of 5.5, 3.3 and 2.2 of 11, then of 7/3 each, whose remainder goes by the shuffle."""
    labels = [0] * 25 + [1] * 15 + [2] * 10
    dev = fewshot.holdout(labels, 11, seed).dev
    assert collections.Counter(labels[row] for row in dev) == {0: 6, 1: 3, 2: 2}
    even = [i % 3 for i in range(30)]
    counts = collections.Counter(even[row] for row in fewshot.holdout(even, 7, seed).dev)
    assert sorted(counts.values()) == [2, 2, 3]


def listed(path, seed):
    """Returns what a file lists of ten rows."""
    return fewshot.sample_split(Listed(rows=str(path)), [0] * 10, seed)


@pytest.mark.parametrize(
    "train, dev, message",
    [
        ([], [1], r"rows.jsonl:2: 'train' and 'dev' must be lists"),
        ([4, 2, 4], [1], r"rows.jsonl:2: row 4 is listed 2 times"),
        ([4], [1, 0, 1], r"rows.jsonl:2: row 1 is listed 2 times"),
        ([4, 2], [0, 2], r"rows.jsonl:2: row 2 is listed 2 times"),
        ([0, 10], [1], r"rows.jsonl:2: row 10 is not in train, .* 0 to 9"),
        ([0], [-1], r"rows.jsonl:2: row -1 is not in train"),
        ("0", [], r"rows.jsonl:2: 'train' and 'dev' must be lists"),
        ([0], [True], r"rows.jsonl:2: 'train' and 'dev' must be lists"),
    ],
)
def test_listed_rows_are_there_and_there_once(train, dev, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"seed": 1, "train": [0, 9], "dev": []}, {"seed": 2, "train": train, "dev": dev}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    actual = listed(path, 1)
    assert actual.train.tolist() == [0, 9] and actual.dev.tolist() == []
    with pytest.raises(InputError, match=message):
        listed(path, 2)


def test_listed_seeds_are_compared_by_their_spelling(tmp_path):
    path = tmp_path / "rows.jsonl"
    for seed in (1, "1", 1.0, "1.0"):
        path.write_text(json.dumps({"seed": seed, "train": [0], "dev": [1]}) + "\n")
        assert listed(path, 1).train.tolist() == [0]
        with pytest.raises(InputError, match="no rows for seed 0; .* seeds 1"):
            listed(path, 0)
    path.write_text('{"seed": true, "train": [0], "dev": [1]}\n')
    with pytest.raises(InputError, match="no rows for seed 1; .* seeds True"):
        listed(path, 1)


def test_dispatch(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"seed": 1, "train": [0], "dev": [1]}\n')
    first = fewshot.kfold(TEN, 5, seed=1)[0]
    for protocol in (KFold(folds=5, k=0), KFold(folds=5, k=0, fold=0)):
        split = fewshot.sample_split(protocol, TEN, 1)
        np.testing.assert_array_equal(split.dev, first.dev)
    cases = {
        KShot(k=2): fewshot.kshot(TEN, 2, seed=1),
        Balanced(n=4): fewshot.balanced(TEN, 4, seed=1),
        Fraction(ratio=0.5): fewshot.fraction(TEN, 0.5, seed=1),
        KFold(folds=3, fold=2, k=4): fewshot.kfold(TEN, 3, seed=1, k=4)[2],
        HoldOut(size=3): fewshot.holdout(TEN, 3, seed=1),
        Listed(rows=str(path)): fewshot.SplitRows([0], [1]),
    }
    assert {protocol.name for protocol in cases} == CHOICES["data.protocol"].options.keys() - {""}
    for protocol, expected in cases.items():
        split = fewshot.sample_split(protocol, TEN, 1)
        np.testing.assert_array_equal(split.train, expected.train)
        np.testing.assert_array_equal(split.dev, expected.dev)


FEW, NAMES = [0, 0, 0, 0, 1, 1], ("bad", "good", "ugly")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fewshot.kshot(FEW, 2, 0, names=NAMES), "'good' has 2 .*k=2 .* needs 4"),
        (lambda: fewshot.kshot(FEW, 1, 0, names=NAMES), "'ugly' has 0 .*needs 2.*=use_fewer"),
        (lambda: fewshot.kfold(FEW, 2, 0, 2, NAMES), "'ugly' has 0 .*k=2 needs 2.*=use_fewer"),
        (lambda: fewshot.balanced([0] * 4 + [1], 4, 0), "class 1 has 1 examples, .* needs 2"),
        (lambda: fewshot.balanced(FEW, 4, 0, NAMES), "'ugly' has 0 examples, .* needs 2"),
        (lambda: fewshot.fraction(FEW, 3), "class 1 has 2 examples, .*ratio=3 .* needs 3"),
        (lambda: fewshot.sample_split(KFold(folds=2, fold=2, k=0), TEN, 1), "fold=2.* 0 to 1"),
        (lambda: fewshot.kshot(TEN, 0, 1), "data.protocol.k=0 must be at least 1"),
        (lambda: fewshot.fraction(TEN, 1.5), "data.protocol.ratio=1.5"),
        (lambda: fewshot.fraction(TEN, 0), "data.protocol.ratio=0 is invalid"),
        (lambda: fewshot.fraction(TEN, 2.5), "data.protocol.ratio=2.5"),
        (lambda: fewshot.fraction(TEN, 1.0, holdout=0.1), "class 0 has 5 examples"),
        (lambda: fewshot.kfold(TEN, 6, 0), "class 0 has 5 examples, .*folds=6 .* needs 6"),
        (lambda: fewshot.kfold(TEN, 4, 0, k=3), "class 0 has 3 examples, .*folds=4 .* needs 4"),
        (lambda: fewshot.kfold(TEN, 1, 0), "data.protocol.folds=1 must be at least 2"),
        (lambda: fewshot.holdout(TEN, 9, 0), "size=9 leaves .* 10 examples of 2 .* can have 8"),
        (lambda: fewshot.balanced(TEN, 1, 0), "data.protocol.n=1 must be at least 2"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(InputError, match=message):
        call()


# -- rows that stay together ----------------------------------------------------------------------

GROUPS = [number // 3 for number in range(30)]  # ten questions of three candidates
RIGHT = [int(number % 3 == 0) for number in range(30)]


@pytest.mark.parametrize(
    "protocol",
    [
        HoldOut(size=7), Fraction(ratio=0.5, holdout=0.3), Fraction(ratio=5, holdout=0.3),
        KFold(folds=5, fold=2, k=0), KShot(k=3, dev_k=4), Balanced(n=6),
    ],
)  # fmt: skip
def test_no_question_is_divided(protocol):
    actual = fewshot.sample_split(protocol, RIGHT, 3, groups=GROUPS)
    train, dev = ({GROUPS[row] for row in part} for part in (actual.train, actual.dev))
    assert dev and not train & dev
    assert len(actual.dev) == 3 * len(dev)
    assert actual.dev.tolist() == sorted(actual.dev) and len({*actual.dev}) == len(actual.dev)
    if isinstance(protocol, KShot | Balanced):
        plain = fewshot.sample_split(protocol, RIGHT, 3)
        assert actual.train.tolist() == plain.train.tolist()
        assert len(plain.dev) <= len(actual.dev) < len(plain.dev) + 3
    else:
        assert len(actual.train) == 3 * len(train)
    sizes = {"holdout": 9, "kfold": 6, "fraction": 9}
    assert len(actual.dev) == sizes.get(protocol.name, len(actual.dev))
    if isinstance(protocol, Fraction):
        assert len(train) == 5


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (HoldOut(size=30), "the 30 training examples belong to only 10 questions"),
        (KFold(folds=11, k=0), "which data.protocol=kfold does not divide"),
    ],
)
def test_too_few_questions(protocol, message):
    with pytest.raises(InputError, match=re.escape(message)):
        fewshot.sample_split(protocol, RIGHT, 0, groups=GROUPS)


def test_questions_that_train_takes_all_of():
    with pytest.raises(InputError, match="which leaves none for dev; .* data.files.dev"):
        fewshot.sample_split(KShot(k=9, dev_k=1), RIGHT, 0, groups=GROUPS)
    everything = KShot(k=20, dev_k=1, on_shortage="use_fewer")
    assert not len(fewshot.sample_split(everything, RIGHT, 0, groups=GROUPS).dev)
