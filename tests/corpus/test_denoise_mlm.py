"""Masked tokens against BERT's definition and transformers' collator; whole words."""

import math

import numpy as np
import pytest

from jaxprompt.corpus.denoise.mlm import Denoiser, make, num_masked
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.errors import InputError
from jaxprompt.types import Role

CLS, SEP, MASK = 1, 2, 3
WORDS = np.arange(10, 50, dtype=np.int32)


def masking(length=66, **changes):
    return Denoiser(length, MASK, (CLS,), (SEP,), WORDS, **changes)


def within(count, total, share, sigmas=5.0):
    """Whether a count is likely, drawn `total` times with a chance of `share`."""
    return abs(count - total * share) < sigmas * math.sqrt(total * share * (1 - share))


def test_golden_row():
    """Pins the draws: a resumed run must go on with the very same masks."""
    objective = masking(22, rate=0.5, masked=0.4, random=0.3)
    sample = objective([np.arange(10, 30)], sample_rng(7, 5))
    at = [1, 2, 8, 10, 12, 13, 16, 17, 18, 19]
    assert sample.label_pos.tolist() == at
    assert sample.targets.tolist() == [i + 9 for i in at]
    shown = [20, 11, MASK, MASK, 21, 14, 25, 26, 43, MASK]
    assert sample.encoder.ids[at].tolist() == shown


@pytest.mark.parametrize(
    ("tokens", "count"), [(0, 0), (1, 1), (3, 1), (9, 1), (10, 2), (126, 19), (510, 76)]
)
def test_number_of_predictions(tokens, count):
    assert num_masked(tokens, 0.15) == count
    if tokens:
        sample = masking(600)([np.full(tokens, 20)], sample_rng(0, 0))
        assert len(sample.label_pos) == count


def test_documents_in_a_row():
    pieces = [np.arange(10, 20), np.arange(20, 45)]
    one = masking()(pieces, sample_rng(0, 0)).encoder
    assert [len(one.ids), one.ids[0], one.ids[11], one.ids[-1]] == [38, CLS, SEP, SEP]
    assert one.segments is None and one.positions.tolist() == list(range(38))

    objective = masking(separate=True)
    separate = objective(pieces, sample_rng(0, 0))
    text = separate.encoder
    assert text.ids[[0, 11, 12, 38]].tolist() == [CLS, SEP, CLS, SEP]
    assert text.segments.tolist() == [1] * 12 + [2] * 27
    assert text.positions.tolist() == [*range(12), *range(27)]
    assert (text.roles == Role.SPECIAL).nonzero()[0].tolist() == [0, 11, 12, 38]
    original = np.concatenate([[CLS], pieces[0], [SEP, CLS], pieces[1], [SEP]])
    np.testing.assert_array_equal(separate.targets, original[separate.label_pos])
    assert not set(separate.label_pos) & {0, 11, 12, 38}


def test_whole_words_of_a_toy_vocabulary():
    word_starts = np.ones(50, bool)
    word_starts[40:] = False  # pieces inside words
    ids = np.array([10, 40, 41, 11, 12, 42, 13, 43, 44, 45, 14, 15, 16, 46, 17, 18, 19, 20, 21, 22])
    words = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12], [13, 14]]
    words += [[i] for i in range(15, 21)]
    objective = masking(word_starts=word_starts, rate=0.25)
    chosen = np.zeros(21)
    for index in range(2000):
        at = set(objective([ids], sample_rng(0, index)).label_pos.tolist())
        assert all(at >= set(word) or not at & set(word) for word in words)
        assert len(at) == 5  # there are always words of one token to fill up with
        chosen[list(at)] += 1
    assert (chosen[1:] > 0).all()


def test_a_word_that_is_too_long_is_left_alone():
    word_starts = np.zeros(50, bool)
    sample = masking(word_starts=word_starts)([np.arange(10, 30)], sample_rng(0, 0))
    assert len(sample.label_pos) == len(sample.targets) == 0


def test_a_document_cut_within_a_word_begins_one():
    objective = masking(word_starts=np.zeros(50, bool), separate=True)
    for index in range(10):  # 5 of 33 tokens may be chosen: the piece of 3 fits, that of 30 not
        sample = objective([np.arange(10, 13), np.arange(10, 40)], sample_rng(0, index))
        assert sample.label_pos.tolist() == [1, 2, 3]


@pytest.mark.parametrize("word_starts", [None, np.ones(50, bool)])
def test_unknown_text_is_never_chosen(word_starts):
    objective = masking(unk_id=9, word_starts=word_starts)
    for index in range(50):
        sample = objective([np.arange(5, 15)], sample_rng(0, index))
        assert 5 not in sample.label_pos and 9 not in sample.targets
    nothing = objective([np.full(8, 9)], sample_rng(0, 0))
    assert len(nothing.label_pos) == 0 and nothing.encoder.ids[1:-1].tolist() == [9] * 8


def test_shares_equal_those_of_transformers(bert):
    """The collator of transformers draws each token by itself; the shares must be the same."""
    transformers = pytest.importorskip("transformers")
    rows = np.random.RandomState(0).randint(2000, 29000, (300, 126))
    framed = [[bert.cls_token_id, *row, bert.sep_token_id] for row in rows.tolist()]
    collator = transformers.DataCollatorForLanguageModeling(bert, return_tensors="np", seed=0)
    theirs = collator([{"input_ids": row} for row in framed])
    objective = make(bert, 128)
    samples = [objective([row], sample_rng(0, i)) for i, row in enumerate(rows)]
    ours = np.stack([sample.encoder.ids for sample in samples])
    read = np.zeros(ours.shape, bool)
    for i, sample in enumerate(samples):
        read[i, sample.label_pos] = True
    original = np.array(framed)
    for shown, chosen in ((ours, read), (theirs["input_ids"], theirs["labels"] != -100)):
        total = chosen.sum()
        assert within(total, rows.size, 0.15)
        assert within((shown[chosen] == bert.mask_token_id).sum(), total, 0.8)
        assert within((shown[chosen] == original[chosen]).sum(), total, 0.1)
        assert not chosen[:, [0, -1]].any()
        np.testing.assert_array_equal(shown[~chosen], original[~chosen])


def test_a_tokenizer_gives_its_specials(bert, roberta):
    for tokenizer, framed in ((bert, (101, 102, 103)), (roberta, (0, 2, 50264))):
        objective = make(tokenizer, 64)
        assert (*objective.cls_ids, *objective.sep_ids, objective.mask_id) == framed
        assert not set(objective.word_ids) & set(tokenizer.all_special_ids)
        assert objective.lengths == (64,) and objective.max_targets == 9


@pytest.mark.parametrize(
    ("length", "changes", "message"),
    [
        (2, {}, "data.max_len=2 leaves no room besides 2 special tokens; use 3 or more"),
        (64, {"rate": 0.0}, "objective.rate=0 "),
    ],
)
def test_settings_out_of_range(length, changes, message):
    with pytest.raises(InputError, match=message) as error:
        masking(length, **changes)
    assert "\n" not in str(error.value)
