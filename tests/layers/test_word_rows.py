"""The row of a word: where it starts, and whether it is looked up or a rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.layers.word_rows import WordRows, hash_vectors, pack_ids


def test_rows_start_on_both_sides_of_zero():
    """In U(-scale, scale): all of it, as often below 0 as above."""
    rows = WordRows(vocab=200, width=64, scale=0.3)
    table = np.asarray(rows.init(jax.random.key(0), jnp.zeros(1, int))["params"]["table"])
    assert table.shape == (256, 64)
    assert -0.3 <= table.min() < -0.299 and 0.299 < table.max() <= 0.3
    assert abs((table < 0).mean() - 0.5) < 4 * 0.5 / np.sqrt(table.size)


@pytest.mark.parametrize(
    "seen_words, stored", [((0, 3, 5), {0: 0, 3: 1, 5: 2}), ((2, 5), {2: 0, 5: 1})]
)
def test_words_seen_have_rows_in_their_order_and_others_the_rule(seen_words, stored):
    """The first of them too, and the word 0, which pads, as any other."""
    rows = WordRows(6, 2, 0.5, pack_ids(np.array(seen_words)))
    table = np.arange(128, dtype=np.float32).reshape(64, 2)
    actual = rows.apply({"params": {"table": jnp.asarray(table)}}, jnp.arange(6))
    for word in range(6):
        expected = table[stored[word]] if word in stored else hash_vectors(word, 2, 0.5, np)
        np.testing.assert_array_equal(actual[word], expected)
