"""Refilling: the texts of each row are those of its batch alone, in fewer steps."""

import functools
import itertools

import jax
import numpy as np
import pytest
from tiny import make_batch, make_tiny

from jaxprompt.models.generation import Search, generate
from jaxprompt.models.model import Model
from jaxprompt.models.sampling import Sampling, make_row_keys
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
@pytest.mark.parametrize("mode", ["1", "3", "sampled"])
@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "glm"])
def test_refilled_rows_write_the_same(family, mode):
    backbone, params = make_tiny(family)
    model = Model(backbone, make_prompt("none", backbone.dims), {})
    batches, frozen = make_batches(family), {"backbone": params}
    num_beams, sampling, keys = int(mode) if mode.isdigit() else 1, Sampling(), ()
    if mode == "sampled":
        sampling, keys = Sampling(1.5, repetition_penalty=1.1), (make_row_keys(0),)
    how = dict(max_new_tokens=NEW, pad=PAD, eos=ENDS, num_beams=num_beams, sampling=sampling)
    how["row_keys"] = keys[0] if keys else None
    run = jax.jit(functools.partial(generate, model, frozen, **how))
    expected, different_lengths, num_steps = {}, set(), 0
    for batch in batches:
        ids, lengths, *_ = map(np.asarray, run(batch))
        num_steps += int(lengths.max()) - 1
        different_lengths |= set(lengths.tolist())
        expected |= {i: row for i, row in zip(batch.index, ids, strict=True) if i >= 0}
    assert len(different_lengths - {0}) > 1

    search = Search(NEW, ENDS, PAD, num_beams, sampling=sampling)
    place = make_placement(1, 1)
    start = compile_step(place, make_start_step(model, search))({}, flatten(frozen), *keys)
    refilling, steps_so_far, actual = make_refilling(place, model, search), [0], {}

    def count(*arguments):
        rows, *result = refilling.run(*arguments)
        steps_so_far.append(int(rows.num_steps))
        return rows, *result

    counting = refilling._replace(run=count)
    for index, texts in counting({}, flatten(frozen), map(start, batches)):
        actual |= dict(zip(index.tolist(), texts.ids, strict=True))
    # Rows that wait for a longer batch start from 0.
    steps = sum(max(0, b - a) for a, b in itertools.pairwise(steps_so_far))
    assert steps <= num_steps
    assert steps < num_steps or num_beams > 1
    assert sorted(actual) == sorted(expected) and len(actual) % ROWS == 1
    for i, ids in expected.items():
        np.testing.assert_array_equal(actual[i], ids)


def test_stopped_rows_make_room():
    """The host stops rows by their ids so far; the others write what they write without that."""
    backbone, params = make_tiny("gpt2")
    model = Model(backbone, make_prompt("none", backbone.dims), {})
    batches, frozen = make_batches("gpt2"), flatten({"backbone": params})
    search, place = Search(40, (-1,), PAD), make_placement(1, 1)
    start = compile_step(place, make_start_step(model, search))({}, frozen)
    refilling, calls = make_refilling(place, model, search), []

    def is_stopped(ids):
        calls.append(len(ids))
        return ids[:, 5] % 2 == 0

    def write(*arguments):
        written = {}
        for index, texts in refilling({}, frozen, map(start, batches), *arguments):
            written |= dict(zip(index.tolist(), zip(*texts[:2], strict=True), strict=True))
        return written

    expected, actual = write(), write(is_stopped)
    assert actual.keys() == expected.keys()
    lengths = {}
    for i, (ids, length) in actual.items():
        lengths[i] = int(length)
        np.testing.assert_array_equal(ids[:length], expected[i][0][:length])
    stopped = {i for i, (ids, _) in expected.items() if ids[5] % 2 == 0}
    assert 0 < len(stopped) < len(expected) and len(calls) > 2
    assert {i for i, length in lengths.items() if length < 40} == stopped
