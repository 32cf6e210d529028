"""Span corruption against T5's definition: counts, exact lengths, sentinels, even draws."""

from collections import Counter

import numpy as np
import pytest

from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.corpus.denoise.span_corruption import (
    Denoiser,
    corrupt,
    corrupted_lengths,
    make,
    noise_counts,
    noise_mask,
    tokens_for,
)
from jaxprompt.errors import InputError

EOS, START = 1, 0
MARKS = np.arange(999, 899, -1, dtype=np.int32)  # <extra_id_0> is 999
SETTINGS = [(0.15, 3.0), (0.1, 3.0), (0.15, 2.0), (0.15, 10.0), (0.25, 3.0), (0.5, 3.0), (0.3, 1.0)]


def runs(mask):
    """Cuts a mask into runs: [(value, length)]."""
    results = []
    for value in mask.tolist():
        if results and results[-1][0] == value:
            results[-1][1] += 1
        else:
            results.append([value, 1])
    return [tuple(run) for run in results]


def by_hand(ids, noise):
    """Corrupts token by token."""
    shown, targets, spans, texts = [], [], 0, 0
    for i, (token, hidden) in enumerate(zip(ids, noise, strict=True)):
        begins = i == 0 or noise[i - 1] != hidden
        if hidden:
            if begins:
                shown.append(999 - spans)
                spans += 1
            targets.append(token)
        else:
            if begins:
                targets.append(999 - texts)
                texts += 1
            shown.append(token)
    return shown, targets


def rebuild(shown, targets):
    """Puts the spans of a target back into the places of its input's sentinels."""
    spans = {}
    for token in targets:
        if token >= 900:
            spans[token] = now = []
        else:
            now.append(token)
    return [word for token in shown for word in (spans[token] if token >= 900 else [token])]


def test_the_example_of_the_paper():
    # "Thank you for inviting me to your party last week ." (Raffel et al. 2020, figure 2)
    noise = np.array([0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0], bool)
    shown, targets = corrupt(np.arange(10, 21, dtype=np.int32), noise, MARKS)
    assert shown.tolist() == [10, 11, 999, 14, 15, 16, 17, 998, 19, 20]
    assert targets.tolist() == [999, 12, 13, 998, 18, 997]  # ends with text, hence a last sentinel


def test_lengths_equal_the_published_rule():
    """The rule searches upwards from `length`; below 10 its counts have rows without noise."""

    def sizes(tokens):
        noise = int(round(tokens * 0.15))
        spans = int(round(noise / 3.0))
        return tokens - noise + spans + 1, noise + spans + 1

    for length in range(10, 1100):
        tokens = length
        while sizes(tokens + 1)[0] <= length:
            tokens += 1
        assert tokens_for(length, 0.15, 3.0) == tokens
        assert corrupted_lengths(tokens, 0.15, 3.0) == sizes(tokens)


@pytest.mark.parametrize(("density", "span"), SETTINGS)
def test_inputs_have_exactly_the_length_asked_for(density, span):
    for length in (3, 4, 7, 16, 61, 128, 512):
        objective = Denoiser(length, START, EOS, np.arange(5000, 4000, -1), density, span)
        ids = np.arange(2, 2 + objective.tokens, dtype=np.int32)
        sample = objective([ids], sample_rng(0, length))
        assert len(sample.encoder.ids) == length
        assert len(sample.targets) == len(sample.decoder.ids) == objective.lengths[1]
        assert len(sample.label_pos) == objective.max_targets


@pytest.mark.parametrize(("density", "span"), SETTINGS)
@pytest.mark.parametrize("tokens", [2, 3, 10, 50, 127, 568])
def test_masks_have_the_counts_of_the_definition(tokens, density, span):
    noise = min(max(round(tokens * density), 1), tokens - 1)
    spans = min(max(round(noise / span), 1), tokens - noise)
    for index in range(20):
        mask = noise_mask(tokens, density, span, sample_rng(3, index))
        actual = runs(mask)
        assert len(mask) == tokens and mask.sum() == noise
        assert len(actual) == 2 * spans and not mask[0] and mask[-1]
        assert min(length for _, length in actual) >= 1


def test_text_stands_before_every_span():
    """Rounding may ask for more spans than there are tokens of text to stand before them."""
    assert noise_counts(3, 0.5, 1.0) == (2, 1)
    assert noise_mask(3, 0.5, 1.0, sample_rng(0, 0)).tolist() == [False, True, True]


def test_every_mask_is_as_likely():
    rng = sample_rng(0, 0)
    counts = Counter(noise_mask(10, 0.5, 2.0, rng).tobytes() for _ in range(12_000))
    assert noise_counts(10, 0.5, 2.0) == (5, 2)
    assert len(counts) == 4 * 4  # where 5 tokens are cut in two, for text and for noise
    share = 1 / 16
    bound = 5 * (12_000 * share * (1 - share)) ** 0.5
    assert max(abs(count - 12_000 * share) for count in counts.values()) < bound


def test_rows_equal_a_corruption_by_hand_and_give_the_text_back():
    objective = Denoiser(128, START, EOS, MARKS)
    ids = np.random.RandomState(0).randint(2, 900, objective.tokens).astype(np.int32)
    before = ids.copy()
    for index in range(50):
        noise = noise_mask(len(ids), 0.15, 3.0, sample_rng(5, index))
        sample = objective([ids], sample_rng(5, index))
        shown, targets = by_hand(ids.tolist(), noise.tolist())
        assert sample.encoder.ids.tolist() == [*shown, EOS]
        assert sample.targets.tolist() == [*targets, EOS]
        assert sample.decoder.ids.tolist() == [START, *targets]
        assert rebuild(shown, targets) == ids.tolist()
        marks = [token for token in shown if token >= 900]
        assert marks == MARKS[: len(marks)].tolist() == [t for t in targets if t >= 900]
    np.testing.assert_array_equal(ids, before)


def test_documents_are_one_text_or_apart():
    pieces = [np.arange(2, 40, dtype=np.int32), np.arange(100, 120, dtype=np.int32)]
    one = Denoiser(64, START, EOS, MARKS)(pieces, sample_rng(0, 0))
    whole = np.concatenate(pieces)
    assert rebuild(one.encoder.ids[:-1], one.targets[:-1]) == whole.tolist()
    assert one.encoder.segments is one.decoder.segments is None

    separate = Denoiser(64, START, EOS, MARKS, separate=True)(pieces, sample_rng(0, 0))
    for number, piece in enumerate(pieces, 1):
        of = separate.encoder.segments == number
        said = separate.decoder.segments == number
        shown, targets = separate.encoder.ids[of], separate.targets[said]
        assert (len(shown), len(targets)) == corrupted_lengths(len(piece), 0.15, 3.0)
        assert shown[-1] == targets[-1] == EOS and targets[0] == 999
        assert rebuild(shown[:-1], targets[:-1]) == piece.tolist()
        assert separate.decoder.ids[said].tolist() == [START, *targets[:-1]]
        assert separate.encoder.positions[of].tolist() == list(range(len(shown)))
        assert separate.decoder.positions[said].tolist() == list(range(len(targets)))


def test_a_tokenizer_gives_its_sentinels(t5):
    objective = make(t5, 512, start=0)
    assert objective.marks.tolist() == list(range(32099, 32099 - 28, -1))
    assert objective.eos == 1 and objective.lengths == (512, 114)


def test_too_few_sentinels(t5):
    with pytest.raises(InputError, match="has no sentinel '<extra_id_100>', but 101"):
        make(t5, 1810, start=0)
    assert len(make(t5, 1809, start=0).marks) == 100


@pytest.mark.parametrize(
    ("length", "changes", "message"),
    [
        (2, {}, "data.max_len=2 is too short for a token, a sentinel and an end token; use 3"),
        (64, {"density": 0.0}, "objective.rate=0 "),
        (64, {"span": 0.5}, "objective.span=0.5 must be at least 1"),
    ],
)
def test_settings_out_of_range(t5, length, changes, message):
    with pytest.raises(InputError, match=message) as error:
        make(t5, length, start=0, **changes)
    assert "\n" not in str(error.value)
