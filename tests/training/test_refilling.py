"""Refilling: the texts of each row are those of its batch alone, in fewer steps."""

import functools
import itertools

import jax
import numpy as np
import pytest
from tiny import make_batch, make_tiny

from jaxprompt.models.generation import Search, generate
from jaxprompt.models.model import Model
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.prompts import make_prompt
from jaxprompt.training.evaluation import compile_step
from jaxprompt.training.refilling import make_refilling, make_start_step
from jaxprompt.tree import flatten
from jaxprompt.types import Batch

ROWS, NEW, PAD = 4, 9, 0
ENDS = (4, 7, 29, 46, 49, 50)  # of which each family writes some, at different steps
# Batches come longest first; a longer one behind shorter ones waits for their last row.
LENGTHS = {"t5": (10, 8, 12, 10), "gpt2": (12, 12, 12)}


def make_batches(family: str) -> list[Batch]:
    """Makes batches of which the last has one row and padding."""
    batches = []
    for i, length in enumerate(LENGTHS.get(family, (12, 10, 10, 12))):
        batch = make_batch(i, rows=ROWS, length=length, family=family)
        batches.append(batch._replace(index=batch.index + i * ROWS))
    last = batches.pop()
    is_real = np.arange(ROWS) < 1
    index = np.where(is_real, last.index, -1)
    return [*batches, last._replace(index=index, weights=np.float32(is_real))]


@pytest.mark.default_cases("gpt2-1")
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "glm"])
def test_refilled_rows_write_the_same(family, num_beams):
    backbone, params = make_tiny(family)
    model = Model(backbone, make_prompt("none", backbone.dims), {})
    batches, frozen = make_batches(family), {"backbone": params}
    how = dict(max_new_tokens=NEW, pad=PAD, eos=ENDS, num_beams=num_beams)
    run = jax.jit(functools.partial(generate, model, frozen, **how))
    expected, different_lengths, num_steps = {}, set(), 0
    for batch in batches:
        ids, lengths, _ = map(np.asarray, run(batch))
        num_steps += int(lengths.max()) - 1
        different_lengths |= set(lengths.tolist())
        expected |= {i: row for i, row in zip(batch.index, ids, strict=True) if i >= 0}
    assert len(different_lengths - {0}) > 1

    search, place = Search(NEW, ENDS, PAD, num_beams), make_placement(1, 1)
    start = compile_step(place, make_start_step(model, search))({}, flatten(frozen))
    refilling, steps_so_far, actual = make_refilling(place, model, search), [0], {}

    def count(*arguments):
        rows, *result = refilling.run(*arguments)
        steps_so_far.append(int(rows.num_steps))
        return rows, *result

    counting = refilling._replace(run=count)
    for index, ids in counting({}, flatten(frozen), map(start, batches)):
        actual |= dict(zip(index.tolist(), ids, strict=True))
    # Rows that wait for a longer batch start from 0.
    steps = sum(max(0, b - a) for a, b in itertools.pairwise(steps_so_far))
    assert steps <= num_steps
    assert steps < num_steps or num_beams > 1
    assert sorted(actual) == sorted(expected) and len(actual) % ROWS == 1
    for i, ids in expected.items():
        np.testing.assert_array_equal(actual[i], ids)
