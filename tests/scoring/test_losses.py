"""Losses against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.heads.pretraining import Detected
from jaxprompt.layers.output import VocabScores
from jaxprompt.scoring.losses import (
    END,
    START,
    binary_cross_entropy,
    count_classes,
    count_hits,
    count_replaced,
    cross_entropy,
    full_vocabulary,
    make_loss,
    nll,
    span_loss,
    squared_error,
    target_loss,
    token_cross_entropy,
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


def test_smoothing_is_spread_over_the_choices_that_an_example_has():
    """Over 4, 3 and 2 of them: each row is torch's loss of its own columns."""
    counts, weights = (4, 3, 2), np.array([1, 2, 0.5], np.float32)
    scores, labels = SCORES[:3].copy(), np.array([3, 0, 1], np.int32)
    expected = 0.0
    for row, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        scores[row, count:] = ABSENT
        (loss,) = torch_losses(SCORES[row : row + 1, :count], labels[row : row + 1], 0.3)
        expected += weight * loss
    total, n = cross_entropy(scores, labels, weights, smoothing=0.3)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert n == 3.5


# What stands in the rows of weight 0, behind a row of weight 2 and one of 0.5; its labels too.
HEAVY = np.array([2, 0.5, 0, 0], np.float32)
FILLING = np.array([[0, 0, 99, 5], [-7, 3, 0, 0]], np.float32)


def test_a_token_counts_the_weight_of_its_row_and_only_where_it_has_a_label():
    scores = np.concatenate([SCORES.reshape(3, 2, 4)[:2], np.stack([FILLING, FILLING])])
    labels = np.array([[1, -1], [0, 3], [2, 1], [-1, -1]], np.int32)
    first, second, third = torch_losses(SCORES[[0, 2, 3]], [1, 0, 3], 0.2)
    total, n = token_cross_entropy(scores, labels, HEAVY, smoothing=0.2)
    np.testing.assert_allclose(total, 2 * first + 0.5 * (second + third), rtol=1e-6)
    assert n == 2 + 0.5 * 2


def torch_binary(scores, right, reduction):
    torch_inputs = torch.tensor(scores), torch.tensor(right, dtype=torch.float32)
    return torch.nn.functional.binary_cross_entropy_with_logits(
        *torch_inputs, reduction=reduction
    ).item()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_binary_losses_are_torchs_over_the_classes_that_are_asked(reduction):
    """Of row 0 all four, of row 1 two: one is absent, one has no label. Smoothing halves."""
    scores = np.concatenate([SCORES[:2], FILLING])
    scores[1, 1] = ABSENT
    labels = np.array([[0, 1, 0, 1], [1, 0, -1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.int32)
    how = dict(is_mean=reduction == "mean")
    total, n = binary_cross_entropy(scores, labels, HEAVY, smoothing=0.2, **how)
    first = torch_binary(SCORES[0], [0.1, 0.9, 0.1, 0.9], reduction)
    second = torch_binary(SCORES[1, [0, 3]], [0.9, 0.1], reduction)
    np.testing.assert_allclose(total, 2 * first + 0.5 * second, rtol=1e-6)
    assert n == 2.5
    # One class a row is right: the others are wrong, without the one that is absent.
    total, _ = binary_cross_entropy(scores, np.array([1, 0, 2, 3], np.int32), HEAVY, **how)
    first = torch_binary(SCORES[0], [0, 1, 0, 0], reduction)
    second = torch_binary(SCORES[1, [0, 2, 3]], [1, 0, 0], reduction)
    np.testing.assert_allclose(total, 2 * first + 0.5 * second, rtol=1e-6)


def test_squared_errors_by_hand():
    scores = np.array([[3], [1], [ABSENT], [np.inf]], np.float32)
    total, n = squared_error(scores, np.array([1, 4, 0, 0], np.float32), HEAVY)
    assert (total, n) == (2 * (3 - 1) ** 2 + 0.5 * (1 - 4) ** 2, 2.5)


def test_a_span_costs_the_mean_of_its_start_and_its_end():
    """A row without an answer in its window, and one of weight 0, cost nothing and count not."""
    scores = np.stack([SCORES[:4], SCORES[2:]], axis=-1)  # [B, M, 2]
    labels = np.array(
        [[0, START, 0, END], [0, 0, START | END, 0], [-1] * 4, [START, END, 0, 0]], np.int32
    )
    weights = np.array([2, 0.5, 1, 0], np.float32)
    starts = torch_losses(SCORES[:2], [1, 2], 0.1)
    ends = torch_losses(SCORES[2:4], [3, 2], 0.1)
    total, n = span_loss(scores, labels, weights, smoothing=0.1)
    expected = 2 * (starts[0] + ends[0]) / 2 + 0.5 * (starts[1] + ends[1]) / 2
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert n == 2.5


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
    scored = VocabScores(LOGP, HIT)
    total, n = target_loss(scored, None, ROWS)
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
