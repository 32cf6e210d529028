"""Losses against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.heads.pretraining import Detected
from jaxprompt.layers.output import Scored
from jaxprompt.scoring.losses import (
    count_classes,
    count_hits,
    count_replaced,
    cross_entropy,
    full_vocabulary,
    make_loss,
    nll,
    on_targets,
)
from jaxprompt.types import ABSENT

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
RNG = np.random.default_rng(0)
SCORES = RNG.normal(0, 3, (6, 4)).astype(np.float32)
LABELS = np.array([0, 3, 1, 2, 2, 0], np.int32)
WEIGHTS = np.array([1, 0.5, 0, 2, 1, 0], np.float32)


def torch_losses(scores, labels, smoothing):
    return torch.nn.functional.cross_entropy(
        torch.tensor(scores), torch.tensor(labels).long(),
        reduction="none", label_smoothing=smoothing,
    ).numpy()  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_is_torchs(smoothing):
    total, n = cross_entropy(SCORES, LABELS, WEIGHTS, smoothing=smoothing)
    expected = torch_losses(SCORES, LABELS, smoothing)
    np.testing.assert_allclose(total, (expected * WEIGHTS).sum(), rtol=1e-6)
    assert n == 4.5


def test_rows_of_weight_zero_have_no_part():
    changed = np.where(WEIGHTS[:, None] > 0, SCORES, 99.0).astype(np.float32)
    labels = np.where(WEIGHTS > 0, LABELS, -1)
    loss = lambda scores, labels: cross_entropy(scores, labels, WEIGHTS)[0]
    assert loss(changed, labels) == loss(SCORES, LABELS)
    grads = jax.grad(loss)(changed, labels)
    assert np.abs(grads[WEIGHTS == 0]).max() == 0 and np.abs(grads[WEIGHTS > 0]).min() > 0


def test_full_vocabulary_takes_the_log_probabilities_as_they_are():
    logp = jax.nn.log_softmax(RNG.normal(size=(6, 9)).astype(np.float32))
    classes = logp[:, [5, 2, 7, 1]]
    scores = jnp.concatenate([classes, jnp.full((6, 1), -0.01)], axis=1)
    total, n = full_vocabulary(scores, LABELS, WEIGHTS)
    picked = np.asarray(classes)[np.arange(6), LABELS]
    np.testing.assert_allclose(total, -(picked * WEIGHTS).sum(), rtol=1e-6)
    assert n == 4.5
    smooth, _ = full_vocabulary(scores, LABELS, WEIGHTS, smoothing=0.2)
    each = 0.8 * picked + 0.2 * np.asarray(classes).mean(1)
    np.testing.assert_allclose(smooth, -(each * WEIGHTS).sum(), rtol=1e-6)


def test_make_loss_picks_by_kind():
    np.testing.assert_array_equal(
        make_loss("restricted", 0.1)(SCORES, LABELS, WEIGHTS),
        cross_entropy(SCORES, LABELS, WEIGHTS, smoothing=0.1),
    )
    labels = np.minimum(LABELS, 2)
    np.testing.assert_array_equal(
        make_loss("full", 0.1)(SCORES, labels, WEIGHTS),
        nll(SCORES[:, :3], labels, WEIGHTS, smoothing=0.1),
    )


def test_scores_in_bfloat16_are_summed_in_float32():
    total, _ = cross_entropy(SCORES.astype(jnp.bfloat16), LABELS, WEIGHTS)
    rounded = np.asarray(SCORES.astype(jnp.bfloat16), np.float32)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(
        total, (torch_losses(rounded, LABELS, 0.0) * WEIGHTS).sum(), rtol=1e-6
    )


LOGP = np.array([[-1.0, -2.0, ABSENT], [-4.0, ABSENT, ABSENT], [-8.0, -16.0, -32.0]], np.float32)
HIT = np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1]], bool)  # where nothing is asked it says nothing
ROWS = np.array([1, 0, 2], np.float32)


def test_targets_by_hand():
    scored = Scored(LOGP, HIT)
    total, n = on_targets(scored, None, ROWS)
    assert (total, n) == (1 + 2 + 2 * (8 + 16 + 32), 2 + 2 * 3)
    assert count_hits(scored, None, ROWS) == {"hits": 1 + 2 * 2}


def test_classes_are_counted_by_weight():
    """A right example counts its weight, one of padding nothing."""
    scores = np.eye(4, dtype=np.float32)[[0, 3, 1, 0, 2, 0]]  # all right but the fourth
    assert count_classes(scores, LABELS, WEIGHTS) == {"hits": 1 + 0.5 + 0 + 0 + 1 + 0}
    assert count_classes(scores, LABELS, 0 * WEIGHTS) == {"hits": 0}


def test_an_answer_outside_the_classes_is_no_hit():
    """The last column of scores over the whole vocabulary is what no class says."""
    scores = np.array([[2, 1, 0], [2, 1, 3], [1, 2, 0], [1, 2, 3]], np.float32)
    labels, weights = np.array([0, 0, 1, 1], np.int32), np.array([1, 2, 4, 8], np.float32)
    assert count_classes(scores, labels, weights) == {"hits": 1 + 4}
    assert count_classes(scores[:, :2], labels, weights) == {"hits": 1 + 2 + 4 + 8}


def test_replaced_by_hand():
    replaced = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1]], bool)
    # Row 0: found, missed; row 2: called wrongly, told rightly, found; twice.
    counted = count_replaced(Detected(LOGP, HIT, replaced), None, ROWS)
    assert counted == {"hits": 1 + 4, "replaced": 2 + 2, "called": 1 + 4, "found": 1 + 2}
