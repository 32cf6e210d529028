"""The layers of a router and its threshold, against numpy and numbers by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.errors import InputError
from jaxprompt.serving.router_fit import (
    best_scale,
    choose_threshold,
    fit_centroids,
    fit_linear,
    logistic_regression,
)


def make_states(seed=0, sizes=(30, 20, 10), width=6):
    """Returns states of unequal scales around a centre per prompt, and their prompts."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    centres = rng.normal(size=(len(sizes), width))
    spread = centres[labels] + rng.normal(0, 1.0, (len(labels), width))
    return spread * 10.0 ** np.arange(-2, width - 2) + 5.0, labels


def softmax(scores):
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def test_centroids_choose_the_nearest_mean():
    """Of whitened states: each squared distance is written out."""
    states, labels = make_states()
    kernel, bias = fit_centroids(states, labels, 3)
    scaled = (states - states.mean(0)) / states.std(0)
    centroids = np.stack([scaled[labels == i].mean(0) for i in range(3)])
    within = np.cov((scaled - centroids[labels]).T, bias=True)
    shrunk = 0.8 * within + 0.2 * np.diag(within).mean() * np.eye(6)
    differences = scaled[:, None] - centroids
    distances = np.einsum("nph,hk,npk->np", differences, np.linalg.inv(shrunk), differences)
    scores = states @ kernel + bias
    np.testing.assert_array_equal(scores.argmax(1), distances.argmin(1))
    # Differences of scores are half of those of squared distances.
    halves = (distances[:, :1] - distances) / 2
    np.testing.assert_allclose(scores - scores[:, :1], halves, atol=1e-4)


def test_the_linear_layer_is_the_optimum():
    """Gradient descent in float64 to the minimum, with every prompt of the same weight."""
    states, labels = make_states(1)
    scaled = (states - states.mean(0)) / states.std(0)
    truth, weights = np.eye(3)[labels], 1 / np.bincount(labels)[labels] / 3
    kernel, bias = np.zeros((6, 3)), np.zeros(3)
    for _ in range(2_000):
        error = weights[:, None] * (softmax(scaled @ kernel + bias) - truth)
        kernel, bias = kernel - (scaled.T @ error + 0.03 * kernel), bias - error.sum(0)
    actual_kernel, actual_bias = fit_linear(states, labels, 3)
    right = softmax(scaled @ kernel + bias)
    np.testing.assert_allclose(softmax(states @ actual_kernel + actual_bias), right, atol=1e-3)
    assert 0.6 < (right.argmax(1) == labels).mean() < 1


def test_the_scale_of_the_best_likelihood():
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 1, (400, 3))
    labels = np.array([rng.choice(3, p=p) for p in softmax(scores)])
    assert best_scale(scores * 50, labels) == pytest.approx(1 / 50, rel=0.25)


def test_the_threshold_is_the_lowest_that_is_accurate():
    confidences = np.array([0.9, 0.3, 0.8, 0.6, 0.7, 0.6])
    is_right = np.array([True, True, True, False, True, True])
    assert choose_threshold(confidences, is_right, 0.8) == 0.5  # 4 of 5
    assert choose_threshold(confidences, is_right, 0.81) == 0.7  # equal ones stay together
    with pytest.raises(InputError, match="accuracy=0.9: no threshold .* 0.833 are"):
        choose_threshold(confidences, ~is_right | (confidences < 0.9), 0.9)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_regression_is_lowered(platform):
    params = {"kernel": jnp.zeros((8, 3)), "bias": jnp.zeros(3)}
    rows = (jnp.zeros((10, 8)), jnp.zeros(10, jnp.int32), jnp.zeros(10))
    traced = logistic_regression.trace(params, *rows)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text and "callback" not in text
