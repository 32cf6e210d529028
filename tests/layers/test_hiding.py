"""Words that an objective hides."""

import jax
import numpy as np
import pytest
from tiny import MASK, make_batch

from jaxprompt.data.batches.stacking import stack_batches
from jaxprompt.layers.hiding import mask_text
from jaxprompt.types import Role


def hidden(batch, share, seed=0):
    actual = mask_text(batch.encoder, jax.random.key(seed), share=share, mask=MASK)
    return [
        sorted((int(at), int(word)) for at, word in zip(places, words, strict=True) if word >= 0)
        for places, words in zip(*map(np.asarray, actual[1:]), strict=True)
    ]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_padding_hides_the_same_words(share):
    """In a grid a batch is as long as that of the longest run beside it."""
    batch, longer = make_batch(0, rows=16), make_batch(1, rows=16, length=30)
    together = stack_batches([batch, longer], 9, "right")
    wide = jax.tree.map(lambda x: x[0], together)
    assert wide.encoder.ids.shape[1] == 30
    for seed in range(4):
        assert hidden(batch, share, seed) == hidden(wide, share, seed)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_as_many_words_of_the_text_are_hidden_as_the_share_says(share):
    batch = make_batch(0, rows=200, length=40)
    text = (batch.encoder.roles == Role.TEXT).sum(1)
    actual = [hidden(batch, share, seed) for seed in range(5)]
    for rows in actual:
        for row, words in enumerate(rows):
            assert 1 <= len(words) <= max(1, np.ceil(2 * share * text[row]))
            at = [place for place, _ in words]
            assert (batch.encoder.roles[row, at] == Role.TEXT).all()
            assert [batch.encoder.ids[row, place] for place in at] == [word for _, word in words]
    counts = [len(hidden_words) for rows in actual for hidden_words in rows]
    if share:  # about; the cap takes some, the least of one adds some
        assert np.mean(counts) == pytest.approx(share * text.mean(), rel=0.15)
    else:
        assert set(counts) == {1}


def test_the_words_with_the_least_chances_are_hidden():
    """Those below the share, but one at least, and no more than twice the share of a text."""
    share, key = 0.15, jax.random.key(3)
    batch = make_batch(0, rows=100, length=24)
    actual, hits = hidden(batch, share, 3), set()
    for row in range(100):
        text = np.flatnonzero(batch.encoder.roles[row] == Role.TEXT)
        chance = np.asarray(jax.random.uniform(jax.random.fold_in(key, row), (24,)))[text]
        order = text[np.argsort(chance)]
        below, limit = int((chance < share).sum()), int(np.ceil(2 * share * len(text)))
        expected = sorted(order[: max(1, min(below, limit))].tolist())
        assert [place for place, _ in actual[row]] == expected
        hits.add((below > limit) - (below < 1))
    assert hits == {-1, 0, 1}  # texts of all three kinds are there


def test_a_text_of_none_hides_nothing():
    batch = make_batch(0, rows=2)
    roles = np.where(batch.encoder.roles == Role.TEXT, Role.HARD, batch.encoder.roles)
    empty = batch._replace(encoder=batch.encoder._replace(roles=roles))
    assert hidden(empty, 0.5) == [[], []]
