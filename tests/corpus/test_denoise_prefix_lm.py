"""Prefix language modelling: places to split, lengths, the form with a sentinel."""

import numpy as np
import pytest

from jaxprompt.corpus.denoise.prefix_lm import Denoiser, make
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.errors import InputError

START, EOS, MARK = 0, 1, 99


@pytest.mark.parametrize("end", [(), (EOS,)])
def test_front_and_rest_are_the_text(end):
    objective = Denoiser(16, START, EOS, end)
    ids = np.arange(10, 10 + objective.tokens)
    for index in range(100):
        sample = objective([ids], sample_rng(0, index))
        front = sample.encoder.ids[: len(sample.encoder.ids) - len(end)]
        assert sample.encoder.ids.tolist() == [*front, *end]
        assert [*front, *sample.targets] == [*ids, EOS]
        assert sample.decoder.ids.tolist() == [START, *sample.targets[:-1]]
        assert sample.label_pos.tolist() == list(range(len(sample.targets)))
        assert len(front) >= 1 and len(sample.targets) >= 2
        assert len(sample.encoder.ids) <= 16 and len(sample.decoder.ids) <= 16


def test_every_place_is_as_likely():
    objective, ids = Denoiser(8, START, EOS), np.arange(10, 18)
    rng = sample_rng(0, 0)
    fronts = np.bincount([len(objective([ids], rng).encoder.ids) for _ in range(7000)])
    assert objective.tokens == 8 and fronts[0] == 0 and len(fronts) == 8  # 1 to 7
    assert abs(fronts[1:] - 1000).max() < 5 * (7000 * 1 / 7 * 6 / 7) ** 0.5


@pytest.mark.parametrize(
    ("end", "mark"), [((), ()), ((EOS,), ()), ((), (MARK,)), ((EOS,), (MARK,))]
)
@pytest.mark.parametrize("length", [4, 5, 8, 33])
def test_the_longest_rows_just_fit(length, end, mark):
    objective = Denoiser(length, START, EOS, end, mark=mark)
    ids = np.arange(100, 100 + objective.tokens)
    rows = [objective([ids], sample_rng(0, index)) for index in range(300)]
    longest = max(len(row.encoder.ids) for row in rows), max(len(row.decoder.ids) for row in rows)
    assert max(longest) == length and objective.lengths == (length, length)


def test_a_fixed_share_fills_the_input():
    objective = Denoiser(512, START, EOS, mark=(MARK,), share=0.5)  # as PPT adapts T5
    assert objective.tokens == 1022 and objective.lengths == (512, 513)
    ids = np.arange(100, 1122)
    sample = objective([ids], sample_rng(0, 0))
    assert sample.encoder.ids.tolist() == [*ids[:511], MARK]
    assert sample.targets.tolist() == [MARK, *ids[511:], EOS]
    assert sample.decoder.ids.tolist() == [START, MARK, *ids[511:]]
    assert len(objective([ids[:2]], sample_rng(0, 0)).encoder.ids) == 2


@pytest.mark.parametrize("share, front", [(0.1, 1), (0.5, 2), (0.9, 3)])
def test_a_fixed_share_leaves_each_side_a_token(share, front):
    """Of 4 tokens: neither an empty input nor nothing to say, whatever the share rounds to."""
    sample = Denoiser(16, START, EOS, share=share)([np.arange(10, 14)], sample_rng(0, 0))
    assert sample.encoder.ids.tolist() == [10, 11, 12, 13][:front]
    assert sample.targets.tolist() == [*[10, 11, 12, 13][front:], EOS]


def test_documents_are_one_text_or_apart():
    pieces = [np.arange(10, 20), np.arange(30, 35)]
    one = Denoiser(16, START, EOS)(pieces, sample_rng(0, 0))
    assert [*one.encoder.ids, *one.targets] == [*pieces[0], *pieces[1], EOS]
    separate = Denoiser(32, START, EOS, (EOS,), separate=True)(pieces, sample_rng(0, 0))
    for number, piece in enumerate(pieces, 1):
        front = separate.encoder.ids[separate.encoder.segments == number]
        rest = separate.targets[separate.decoder.segments == number]
        assert [*front[:-1], *rest] == [*piece, EOS] and front[-1] == EOS
        assert separate.decoder.ids[separate.decoder.segments == number].tolist() == [
            START,
            *rest[:-1],
        ]


def test_a_tokenizer_gives_its_specials(t5):
    objective = make(t5, 64, start=0, mark=True)
    assert (objective.eos, objective.encoder_end, objective.mark) == (1, (1,), (32099,))
    assert make(t5, 64, start=0, eos=False).encoder_end == ()


def test_bad_input(t5, roberta):
    with pytest.raises(InputError, match="data.max_len=2 is too short to split; use 3"):
        make(t5, 2, start=0)
    with pytest.raises(InputError, match="has no sentinel '<extra_id_0>', but 1"):
        make(roberta, 64, start=2, mark=True)
