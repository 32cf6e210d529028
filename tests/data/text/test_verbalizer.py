"""Label words: their pieces, and the rows of the vocabulary that they use."""

import numpy as np
import pytest

from jaxprompt.data.text.verbalizer import make_verbalizer
from jaxprompt.errors import InputError


def test_single_words(bert):
    verbalizer = make_verbalizer(bert, ["terrible", "great"])
    assert verbalizer.words == (("terrible",), ("great",))
    assert verbalizer.ids.tolist() == [[[6659]], [[2307]]]
    assert verbalizer.ids.dtype == np.int32
    assert verbalizer.num_masks == 1


def test_several_words_of_several_pieces(bert):
    verbalizer = make_verbalizer(bert, [("good", "unwatchable"), "bad"])
    pieces = bert.convert_tokens_to_ids(["un", "##watch", "##able"])
    good, bad = bert.convert_tokens_to_ids(["good", "bad"])
    assert verbalizer.num_masks == 3
    assert verbalizer.ids.tolist() == [[[good, -1, -1], pieces], [[bad, -1, -1], [-1] * 3]]


def test_byte_level_words_stand_inside_a_sentence(roberta):
    tokens = roberta.convert_ids_to_tokens(make_verbalizer(roberta, ["great", "bad"]).ids[:, 0, 0])
    assert tokens == ["Ġgreat", "Ġbad"]
    bare = make_verbalizer(roberta, ["great", "bad"], leading_space=False)
    assert roberta.convert_ids_to_tokens(bare.ids[:, 0, 0]) == ["great", "bad"]


def test_letters_without_a_space_are_pieces_of_their_own(t5):
    glued = make_verbalizer(t5, ["A", "B", "C"], leading_space=False).ids
    assert glued.tolist() == [[[188]], [[279]], [[254]]]
    assert make_verbalizer(t5, ["A"]).ids.tolist() == [[[71]]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["good", "☃"], "'☃' of class 1 is not in the vocabulary"),
        (["good", " "], "' ' of class 1 is empty"),
        (["good", ""], "'' of class 1 is empty"),
        ([("good", "fine"), ("bad", "Good")], "'good' of class 0 and 'Good' of class 1"),
        ([("good", "good"), "bad"], "'good' of class 0 and 'good' of class 0"),
    ],
)
def test_bad_words(bert, words, message):
    with pytest.raises(InputError, match=message) as error:
        make_verbalizer(bert, words)
    assert "\n" not in str(error.value)
