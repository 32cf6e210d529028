"""A pass compiles each of its shapes once, beside the batches that run."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.data.batches.batching import EvalBatches, Layout
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.errors import InputError
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.training.evaluation import compile_step, predict_scores
from jaxprompt.types import Role

LENGTHS = [3] * 4 + [9] * 4 + [20] * 6 + [30]


def make_batches():
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = np.full(length, number, np.int32)
        places, roles = np.arange(length, dtype=np.int32), np.full(length, Role.TEXT, np.int8)
        last = np.array([length - 1], np.int32)
        rows.append([Encoded(ids, np.full(length, -1, np.int32), 0 * ids, roles, places, last)])
    return EvalBatches(rows, [0] * len(rows), Layout(4, 32, 0))


def test_firsts_are_the_first_batches_of_their_lengths():
    batches = make_batches()
    lengths = [batch.encoder.ids.shape[1] for batch in batches]
    firsts = list(batches.one_of_each_shape())
    assert lengths == [32, 24, 16, 8]
    assert [batch.encoder.ids.shape[1] for batch in firsts] == lengths
    for batch, first in zip(batches, firsts, strict=True):
        np.testing.assert_array_equal(batch.index, first.index)
    shapes = batches.shapes - {(4, 16)}
    assert [batch.encoder.ids.shape for batch in batches.one_of_each_shape(shapes)] == [(4, 16)]


def test_each_shape_is_compiled_once_and_in_threads():
    traced = []

    def step(trainable, frozen, batch):
        traced.append((batch.encoder.ids.shape[1], threading.current_thread()))
        return jnp.stack([batch.encoder.ids.sum(1), batch.encoder.mask.sum(1)], 1)

    batches, placed = make_batches(), compile_step(make_placement(1, 1), step)
    scores = [predict_scores(placed, {}, {}, batches, len(LENGTHS)) for _ in range(2)]
    expected = [[n * length, length] for n, length in enumerate(LENGTHS)]
    for actual in scores:
        np.testing.assert_array_equal(actual, expected)
    assert sorted(length for length, _ in traced) == [8, 16, 24, 32]  # none again in the second
    here = threading.main_thread()
    assert [length for length, thread in traced if thread is here] == [32]


def test_what_a_compiler_raises_is_raised_where_it_is_asked_for():
    def step(trainable, frozen, batch):
        if batch.encoder.ids.shape[1] == 16:
            raise InputError("16 is too short")
        return batch.encoder.ids[:, :1]

    placed = compile_step(make_placement(1, 1), step)
    with pytest.raises(InputError, match="16 is too short"):
        predict_scores(placed, {}, {}, make_batches(), len(LENGTHS))
