import jax
import numpy as np
import pytest
from tiny import make_batch, make_tiny

from jaxprompt.heads.pretraining import TargetHead
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.runs.fill_report import LEGENDS, make_fill_step, render
from jaxprompt.tree import flatten
from jaxprompt.types import Batch, Tokens

WORDS = "[PAD] [CLS] [SEP] [MASK] the old house stood ##s near cat".split()


class WordPieces:
    """Spells the words above as a WordPiece tokenizer does."""

    def convert_ids_to_tokens(self, ids):
        return [WORDS[i] if i < len(WORDS) else None for i in ids]

    def convert_tokens_to_string(self, pieces):
        return " ".join(pieces).replace(" ##", "")

    def decode(self, ids):
        return self.convert_tokens_to_string([WORDS[i] for i in ids])


def tokens(rows):
    ids = np.array(rows, np.int32)
    zeros = np.zeros_like(ids)
    return Tokens(ids, ids > 0, zeros - 1, zeros, zeros, zeros)


def batch(rows, label_pos, targets, decoder=None):
    arrays = tokens(rows), np.array(label_pos), np.zeros(len(rows)), np.ones(len(rows))
    return Batch(*arrays, np.arange(len(rows)), decoder, np.array(targets))


def ids(text):
    return [WORDS.index(word) for word in text.split()]


def test_masked_tokens_are_shown_where_they_stand():
    row = ids("[CLS] the [MASK] house stood [MASK] [SEP]") + [0]
    masked = batch([row], [[2, 5, 0]], [[WORDS.index("old"), WORDS.index("##s"), -1]])
    guess = np.array([ids("old near [PAD]")])
    legend, text = render("mlm", WordPieces(), masked, guess, None)
    assert legend == LEGENDS["mlm"]
    assert text == "[CLS] the [old] house stood[near|s] [SEP]"


def test_replaced_tokens_are_found_missed_and_cried_for():
    row = ids("[CLS] the [MASK] house [MASK] [MASK] near [SEP]")
    replaced = batch([row], [[2, 4, 5]], [ids("old stood ##s")])
    sampled = np.array([ids("cat stood cat")])
    is_original = np.array([[True, True, True, False, True, False, True, True]])
    _, text = render("rtd", WordPieces(), replaced, sampled, is_original)
    assert text == "[CLS] the [+cat|old] [!house] stood[-cat|s] near [SEP]"


def test_a_row_of_the_vocabulary_without_a_token_is_shown_by_its_number():
    """Vocabularies are padded to a multiple of 64, and a model may find such a row likeliest."""
    row, places = ids("[CLS] the [MASK] house [SEP]"), [[WORDS.index("old")]]
    is_right = np.ones((1, 5), bool)
    for objective, hits, shown in (("mlm", None, "[[40]|old]"), ("rtd", is_right, "[+[40]|old]")):
        _, text = render(
            objective, WordPieces(), batch([row], [[2]], places), np.array([[40]]), hits
        )
        assert text == f"[CLS] the {shown} house [SEP]"


def test_a_decoder_is_shown_beside_what_was_read():
    pairs = batch([ids("the cat"), ids("old cat")], [[0, 1]] * 2, [ids("stood near"), [4, -1]])
    pairs = pairs._replace(decoder=pairs.encoder, weights=np.array([1.0, 0.0]))
    shown = list(render("span_corruption", WordPieces(), pairs, np.array([[7, 4], [4, 4]]), None))
    assert shown == [
        LEGENDS["seq2seq"],
        "read:   the cat",
        "truth:  stood near",
        "filled: stood the",
    ]


def test_a_causal_model_is_shown_by_the_end_of_its_row():
    texts = batch([ids("the cat")], [[0, 1]], [ids("cat stood")])
    shown = list(render("clm", WordPieces(), texts, np.array([[10, 5]]), None))
    assert shown == [LEGENDS["causal"], "truth:  cat stood", "filled: cat old"]


@pytest.mark.long
@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
def test_the_likeliest_tokens_are_those_of_the_whole_softmax(family):
    module, params = make_tiny(family)
    batch = make_batch(rows=3, family=family)
    model = Model(module, make_prompt("none", module.dims), {"main": TargetHead()})
    variables = {"backbone": params}
    actual, none = make_fill_step(model)(flatten(variables), {}, batch, jax.random.key(0))
    assert actual.shape == batch.label_pos.shape and none is None
    # A target that is the likeliest is a hit, and no other token of the vocabulary is.
    assert model.forward(variables, batch._replace(targets=actual)).hit.all()
    assert not model.forward(variables, batch._replace(targets=(actual + 1) % 53)).hit.any()
