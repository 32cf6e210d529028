"""The linear head: poolers, choices, dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal, draw_params, make_batch, make_tiny

from jaxprompt.heads.linear import POOLERS
from jaxprompt.heads.linear import Classifier as Head
from jaxprompt.types import ABSENT, Injection, Role

BACKBONE, WEIGHTS = make_tiny()
BOUND = BACKBONE.bind({"params": WEIGHTS})
HIDDEN = np.random.default_rng(0).normal(size=(8, 12, 16)).astype(np.float32)
BATCH = make_batch(slots=2, side="left")


def make(batch=BATCH, hidden=HIDDEN, **fields):
    head = Head(**({"classes": 3, "dropout": 0.0} | fields))
    args = hidden, batch, Injection(), BOUND
    params = draw_params(head, *args, deterministic=True)
    return head, params, head.apply({"params": params}, *args, deterministic=True)


def dense(x, params):
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def pooled(pooler, params):
    tokens = BATCH.encoder
    if pooler == "mean":
        rows = []
        for row in range(8):
            keep = [
                HIDDEN[row, t]
                for t in range(12)
                if tokens.mask[row, t] and tokens.roles[row, t] != Role.SOFT
            ]
            rows.append(np.mean(keep, axis=0))
        return np.stack(rows)
    first = np.stack([HIDDEN[row, BATCH.label_pos[row, 0]] for row in range(8)])
    if pooler == "checkpoint":
        return np.tanh(dense(first, WEIGHTS["pooler"]))
    return np.tanh(dense(first, params["pooler"])) if pooler == "trained" else first


@pytest.mark.parametrize("pooler", POOLERS)
def test_poolers(pooler):
    _, params, scores = make(pooler=pooler)
    assert set(params) == ({"pooler", "out"} if pooler == "trained" else {"out"})
    assert scores.shape == (8, 3)
    assert_close(scores, dense(pooled(pooler, params), params["out"]))


def test_the_mean_sees_neither_pads_nor_soft_tokens():
    head, params, scores = make(pooler="mean")
    tokens = BATCH.encoder
    out = ~tokens.mask | (tokens.roles == Role.SOFT)
    assert out.any(1).all() and (tokens.roles == Role.SOFT).sum() == 16
    spoilt = np.where(out[..., None], np.nan, HIDDEN)
    again = head.apply({"params": params}, spoilt, BATCH, Injection(), BOUND, deterministic=True)
    assert_equal(again, scores)


def test_choices_are_the_classes_of_their_example():
    batch = make_batch(rows=2, choices=4)
    _, params, scores = make(batch, classes=1)
    assert scores.shape == (2, 4) and params["out"]["kernel"].shape == (16, 1)
    first = HIDDEN[np.arange(8), batch.label_pos[:, 0]]
    each = dense(first, params["out"])[:, 0]
    assert_close(scores, np.array([each[:4], each[4:]]))


def test_choices_listed_in_one_row():
    """A class that is a choice which an example lacks is not scored."""
    counts = np.array([2, 3, 4, 2, 3, 4, 4, 4], np.int32)
    head, params, whole = make(classes=4)
    batch = BATCH._replace(counts=counts)
    scores = head.apply({"params": params}, HIDDEN, batch, Injection(), BOUND, deterministic=True)
    assert_equal(scores, np.where(np.arange(4) < counts[:, None], whole, ABSENT))


def test_dropout_in_training_alone():
    head, params, scores = make(dropout=0.5)
    run = lambda seed: head.apply(
        {"params": params}, HIDDEN, BATCH, Injection(), BOUND, deterministic=False,
        rngs={"dropout": jax.random.key(seed)},
    )  # fmt: skip
    assert_equal(run(0), run(0))
    assert np.abs(run(0) - run(1)).max() > 0.01 and np.abs(run(0) - scores).max() > 0.01


@pytest.mark.parametrize("pooler", POOLERS)
def test_scores_are_float32_for_bfloat16(pooler):
    _, _, scores = make(hidden=jnp.asarray(HIDDEN, jnp.bfloat16), pooler=pooler)
    assert scores.dtype == jnp.float32
    assert_close(scores, make(pooler=pooler)[2], rtol=0.05)
