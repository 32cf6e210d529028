"""Word starts, plain words and sentinels of real tokenizers, against what the text says."""

from types import SimpleNamespace

import numpy as np
import pytest
from sentence_pieces import KINDS, write_pieces

from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.corpus.denoise.vocabulary import plain_words, word_starts
from jaxprompt.data.text.specials import sentinel_ids
from jaxprompt.data.text.tokenizer import encode_exact, load_tokenizer
from jaxprompt.errors import InputError

TEXT = "Unbelievably, the interlocutors' (re)calibration cost 1,234.50 euros — naïvely put."


def test_wordpieces_begin_words_as_the_tokenizer_says(bert):
    tokens = bert(TEXT, add_special_tokens=False)
    words = tokens.word_ids()
    expected = [i == 0 or words[i] != words[i - 1] for i in range(len(words))]
    assert word_starts(bert)[tokens["input_ids"]].tolist() == expected
    assert not all(expected)


@pytest.mark.parametrize("name", ["roberta", "t5"])
def test_spaces_begin_words(name, request):
    tokenizer = request.getfixturevalue(name)
    tokens = tokenizer(TEXT, add_special_tokens=False, return_offsets_mapping=True)
    spans = tokens["offset_mapping"]
    ends = [0, *(end for _, end in spans)]  # of the token before: T5's tokens hold their space
    begins = [
        TEXT[start].isspace() or end < start for (start, _), end in zip(spans, ends, strict=False)
    ]
    starts = word_starts(tokenizer)[tokens["input_ids"]]
    assert starts[1:].tolist() == begins[1:] and any(begins) and not all(begins[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_sentence_pieces(kind, tmp_path):
    tokenizer = load_tokenizer(write_pieces(tmp_path, kind))
    starts = word_starts(tokenizer)[encode_exact(tokenizer, " hello worlds")]
    assert starts[0] and starts.sum() == 2


def test_words_equal_those_of_transformers(roberta):
    transformers = pytest.importorskip("transformers")
    tokens = roberta(TEXT, return_offsets_mapping=True, return_special_tokens_mask=True)
    special = np.array([tokens["special_tokens_mask"]])
    offsets = np.array([tokens["offset_mapping"]])
    collator = transformers.DataCollatorForLanguageModeling
    words, _ = collator._calc_word_ids_and_prob_mask(offsets, special)
    starts = word_starts(roberta)[tokens["input_ids"][1:-1]]
    starts[0] = True
    np.testing.assert_array_equal(np.cumsum(starts), words[0, 1:-1])


def test_plain_words_are_no_specials(bert, roberta, t5):
    for tokenizer in (bert, roberta, t5):
        words = plain_words(tokenizer)
        assert (np.diff(words) > 0).all() and words.max() < len(tokenizer)
        assert not set(words.tolist()) & set(tokenizer.all_special_ids)
    assert not set(plain_words(bert).tolist()) & set(range(1, 100))  # [unused0] and so on
    assert len(plain_words(bert)) == 30522 - 5 - 994
    assert plain_words(t5).max() == 31999


def test_sentinels_in_order(t5):
    assert sentinel_ids(t5, 3) == (32099, 32098, 32097)
    spelt = SimpleNamespace(get_vocab=lambda: {"▁<extra_id_0>": 5, "<extra_id_1>": 4})
    assert sentinel_ids(spelt, 2) == (5, 4)


def test_words_that_no_tokenizer_marks():
    backend = SimpleNamespace(model=SimpleNamespace(), pre_tokenizer="Whitespace()")
    tokenizer = SimpleNamespace(name_or_path="toy", backend_tokenizer=backend)
    with pytest.raises(InputError, match="'toy' does not mark where words begin; whole words need"):
        word_starts(tokenizer)


def test_the_randomness_of_a_row_is_pinned():
    order = [5, 2, 1, 9, 4, 0, 3, 6, 7, 8]
    assert sample_rng(7, 5).permutation(10).tolist() == order
    assert sample_rng(7, 5).random_sample() == 0.0487398305493153
    assert sample_rng(5, 7).permutation(10).tolist() != order
