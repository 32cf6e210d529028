"""Causal language modelling: the next token of the same document."""

import numpy as np
import pytest

from jaxprompt.corpus.denoise.clm import Denoiser, make
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.errors import InputError

PIECES = [np.array([10, 11, 12, 9]), np.array([20, 21])]
RNG = sample_rng(0, 0)


def test_each_token_predicts_the_next():
    sample = Denoiser(6, (9,))(PIECES, RNG)
    assert sample.encoder.ids.tolist() == [10, 11, 12, 9, 20, 21]
    assert sample.label_pos.tolist() == [0, 1, 2, 3, 4]
    assert sample.targets.tolist() == [11, 12, 9, 20, 21]
    assert sample.decoder is None and sample.encoder.segments is None


def test_no_token_predicts_another_document():
    sample = Denoiser(6, (9,), separate=True)(PIECES, RNG)
    assert sample.label_pos.tolist() == [0, 1, 2, 4]
    assert sample.targets.tolist() == [11, 12, 9, 21]
    assert sample.encoder.positions.tolist() == [0, 1, 2, 3, 0, 1]


def test_a_tokenizer_gives_its_end(roberta, bert):
    objective = make(roberta, 32)
    assert objective.end_ids == (2,) and objective.lengths == (32,) and objective.max_targets == 31
    with pytest.raises(InputError, match="has no eos token"):
        make(bert, 32)
    with pytest.raises(InputError, match="data.max_len=1 leaves no next token; use 2"):
        make(roberta, 1)
