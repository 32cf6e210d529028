"""Sampling: scores as in transformers, frequencies, and samples that depend on their row alone."""

import functools

import jax
import numpy as np
import pytest
from scipy import special, stats
from tiny import assert_close, make_batch, make_tiny

from jaxprompt.errors import InputError
from jaxprompt.models.generation import generate
from jaxprompt.models.model import Model
from jaxprompt.models.sampling import (
    Sampling,
    derive_keys,
    draw_tokens,
    filter_scores,
    make_row_keys,
    penalize_repetition,
    read_tokens,
)
from jaxprompt.prompts import make_prompt
from jaxprompt.types import SharedPrefix

V = 97
SETTINGS = {
    "temperature": dict(temperature=0.3),
    "top_k": dict(temperature=1.0, top_k=7),
    "top_p": dict(temperature=1.5, top_p=0.6),
    "min_p": dict(temperature=2.0, min_p=0.2),
    "all": dict(temperature=0.8, top_k=30, top_p=0.8, min_p=0.05),
}


def random_scores(rows=50, vocab=V, scale=3.0):
    return np.random.default_rng(0).normal(0, scale, (rows, vocab)).astype(np.float32)


def probabilities(scores):
    return special.softmax(np.asarray(scores, np.float64), axis=-1)


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_are_filtered_as_in_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    fields, scores = SETTINGS[name], random_scores()
    warpers = [theirs.TemperatureLogitsWarper(fields["temperature"])]
    kinds = {
        "top_k": theirs.TopKLogitsWarper, "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
    }  # fmt: skip
    warpers += [kind(fields[field]) for field, kind in kinds.items() if field in fields]
    expected = torch.tensor(scores)
    for warper in warpers:
        expected = warper(None, expected)
    actual = probabilities(filter_scores(scores, Sampling(**fields)))
    np.testing.assert_allclose(actual, probabilities(expected), rtol=0, atol=1e-6)
    num_kept = (actual > 0).sum(1)
    assert num_kept.min() >= 1 and ((num_kept < V).all() or name == "temperature")


def test_repetition_is_penalized_as_in_transformers():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    batch, scores = make_batch(rows=4, slots=2), random_scores(4)
    tokens = batch.encoder
    seen = read_tokens(tokens, SharedPrefix((95, 96), (-1, 3), (0, 0), (0, 0)), V)
    ids = [np.append(row[m & (s < 0)], 95) for row, m, s in zip(*tokens[:3], strict=True)]
    expected = [
        RepetitionPenaltyLogitsProcessor(1.7)(
            torch.tensor(row[None]), torch.tensor(scores[i, None])
        )
        for i, row in enumerate(ids)
    ]
    assert_close(penalize_repetition(scores, seen, 1.7), np.concatenate(expected), 1e-6)


@pytest.mark.parametrize("fields", [dict(temperature=0.7), dict(temperature=1.0, top_k=5)])
def test_tokens_are_as_frequent_as_probable(fields):
    """A chi-squared test; removed tokens never occur."""
    count, vocab = 20_000, 23
    scores = filter_scores(random_scores(1, vocab, 1.0), Sampling(**fields))
    keys = jax.jit(derive_keys)(make_row_keys(3), np.arange(count))
    rows = np.broadcast_to(scores, (count, vocab))
    drawn = np.asarray(jax.jit(draw_tokens)(keys, np.zeros(count, np.int32), rows))
    expected = probabilities(scores)[0] * count
    observed = np.bincount(drawn, minlength=vocab)
    assert not observed[expected == 0].any()
    possible = expected > 0
    assert stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-3
    later = np.asarray(jax.jit(draw_tokens)(keys, np.ones(count, np.int32), rows))
    together = np.mean(later == drawn)  # steps are independent
    assert together == pytest.approx(np.square(expected / count).sum(), abs=0.02)


def test_a_key_is_that_of_the_example_and_the_sample():
    derive = jax.jit(derive_keys)
    make = lambda *origin: np.asarray(derive(make_row_keys(*origin), np.arange(12)))
    keys = make(1, 5)
    assert len(np.unique(keys, axis=0)) == 12
    np.testing.assert_array_equal(make(1, 6)[:-1], keys[1:])  # another chunk of the input
    several = make(1, 5, 4)
    np.testing.assert_array_equal(several[::4], keys[:3])  # more samples keep the first
    assert len(np.unique(several, axis=0)) == 12
    assert (make(2, 5) != keys).all(1).any()


def test_a_sample_depends_on_its_row_alone():
    """Not on the other rows of the batch, the padding, or on which side it is."""
    backbone, params = make_tiny("llama")
    model = Model(backbone, make_prompt("none", backbone.dims), {})
    sampling = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    how = dict(max_new_tokens=5, eos=4, pad=0, sampling=sampling)
    run = jax.jit(functools.partial(generate, model, {"backbone": params}, **how))
    batch, keys = make_batch(rows=6, family="llama"), make_row_keys(0)
    ids, lengths, _, logprobs = map(np.asarray, run(batch, row_keys=keys))
    assert len(np.unique(ids, axis=0)) == 6
    order = np.array([4, 1, 1, 0, 5, 2])
    moved = run(jax.tree.map(lambda x: x[order], batch), row_keys=keys)
    left = run(make_batch(rows=6, family="llama", side="left"), row_keys=keys)
    np.testing.assert_array_equal(moved.ids, ids[order])
    np.testing.assert_array_equal(left.ids, ids)
    np.testing.assert_array_equal(left.lengths, lengths)
    assert_close(left.logprobs, logprobs, 1e-4)
    assert (np.asarray(run(batch, row_keys=make_row_keys(1)).ids) != ids).any()


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(temperature=-0.5), "temperature=-0.5 must be at least 0"),
        (dict(temperature=1.0, top_p=0.0), r"top_p=0.0 must be in \(0, 1\]"),
        (dict(temperature=1.0, min_p=1.0), r"min_p=1.0 must be in \[0, 1\)"),
        (dict(repetition_penalty=0), "repetition_penalty=0 must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Sampling(**fields).check()
