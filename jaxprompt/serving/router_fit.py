"""Fits the layer of a router to states of texts, and chooses its threshold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxprompt.errors import InputError

_MIN_THRESHOLD = 0.5  # a less likely prompt is more often wrong than right
_SHRINKAGE = 0.2  # of the covariance of the centroid kind
_SCALES = np.logspace(-3, 0, 61)  # of its scores
_DECAY, _RATE, _STEPS = 0.03, 0.05, 500  # weight decay of the linear kind, and Adam's options

LinearLayer = tuple[np.ndarray, np.ndarray]  # kernel [H, P], bias [P]


def _standardise(states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns standardised states [N, H], and the mean and standard deviation [H] before."""
    mean, std = states.mean(0), np.maximum(states.std(0), 1e-6)
    return (states - mean) / std, mean, std


def _of_raw_states(
    kernel: np.ndarray, bias: np.ndarray, mean: np.ndarray, std: np.ndarray
) -> LinearLayer:
    """Converts a linear layer on standardised states to one on states."""
    kernel = kernel / std[:, None]
    return kernel, bias - mean @ kernel


def fit_centroids(states: np.ndarray, labels: np.ndarray, count: int) -> LinearLayer:
    """Returns a linear layer that is greatest for the prompt with the nearest mean state.

    The distance is Mahalanobis': states are whitened by the covariance within prompts, which is
    shrunk towards a multiple of the identity (linear discriminant analysis with equal priors).

    Args:
      states: float [N, H].
      labels: prompts, int [N].
      count: number P of prompts.
    """
    scaled, mean, std = _standardise(states.astype(np.float64))
    centroids = np.stack([scaled[labels == index].mean(0) for index in range(count)])
    residuals = scaled - centroids[labels]
    covariance = residuals.T @ residuals / len(states)
    size = len(covariance)
    identity = np.eye(size) * (np.trace(covariance) / size + 1e-6)
    covariance = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * identity
    # -|s - c|^2 / 2 without the part of s alone.
    kernel = np.linalg.solve(covariance, centroids.T)
    return _of_raw_states(kernel, -(centroids.T * kernel).sum(0) / 2, mean, std)


def fit_linear(states: np.ndarray, labels: np.ndarray, count: int) -> LinearLayer:
    """Fits a multinomial logistic regression on standardised states, with weight decay.

    Every prompt has the same weight, however many rows it has. Arguments as in `fit_centroids`.
    """
    scaled, mean, std = _standardise(states)
    weights = (1 / np.bincount(labels, minlength=count)[labels] / count).astype(np.float32)
    zeros = {"kernel": jnp.zeros((states.shape[1], count)), "bias": jnp.zeros(count)}
    params = jax.tree.map(np.asarray, logistic_regression(zeros, scaled, labels, weights))
    return _of_raw_states(params["kernel"], params["bias"], mean, std)


@jax.jit
def logistic_regression(
    params: dict[str, jax.Array], states: jax.Array, labels: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
    """Minimises the weighted cross-entropy of labels [N] from states [N, H], with weight decay."""
    optimizer = optax.adam(optax.cosine_decay_schedule(_RATE, _STEPS))

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        logp = jax.nn.log_softmax(states @ params["kernel"] + params["bias"])
        decay = _DECAY / 2 * (params["kernel"] ** 2).sum()
        return decay - (weights * logp[jnp.arange(len(labels)), labels]).sum()

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), length=_STEPS)[0][0]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Returns the probabilities of scores [N, P]."""
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def best_scale(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the factor of scores whose softmax is the most likely. [N, P], [N]"""
    rows = np.arange(len(labels))

    def likelihood(scale: float) -> float:
        return np.log(softmax(scores * scale)[rows, labels] + 1e-30).sum()

    return float(max(_SCALES, key=likelihood))


def choose_threshold(confidences: np.ndarray, is_right: np.ndarray, accuracy: float) -> float:
    """Returns the lowest probability, from 0.5 on, above which this share of rows is right.

    Raises:
      InputError: if there is none.
    """
    order = np.argsort(confidences)
    confidences, right = confidences[order], is_right[order]
    # Of each row and those with a higher probability.
    shares = right[::-1].cumsum()[::-1] / np.arange(len(right), 0, -1)
    thresholds = np.unique([_MIN_THRESHOLD, *confidences[confidences > _MIN_THRESHOLD]])
    for threshold, first in zip(thresholds, np.searchsorted(confidences, thresholds), strict=True):
        if first < len(shares) and shares[first] >= accuracy:
            return float(threshold)
    raise InputError(
        f"accuracy={accuracy}: no threshold routes this share of the held-out rows correctly; "
        f"without a threshold {is_right.mean():.3f} are: use a lower accuracy, or more rows"
    )
