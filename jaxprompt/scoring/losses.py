"""Losses: (scores, labels, weights) -> (sum, normaliser), exact under padding and uneven hosts.

Additional counts, `count_*`, are exact in the same way: {name: sum}.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxprompt.types import ABSENT

START, END = 1, 2  # bits of a token's label: an answer begins here, ends here


def cross_entropy(scores, labels, weights, *, smoothing: float = 0.0):
    """Sums -log softmax at the label; smoothing spreads that share of the target over all classes.

    [B, C], [B], [B] -> (scalar, scalar)
    """
    return nll(
        jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1),
        labels,
        weights,
        smoothing=smoothing,
    )


def nll(logp, labels, weights, *, smoothing: float = 0.0):
    """Sums -log p at the label, for normalised scores. [B, C], [B], [B] -> (scalar, scalar)"""
    at_label = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    # Half of ABSENT is below all real scores, and above ABSENT after a log-softmax.
    present = logp > 0.5 * ABSENT  # choices that the example has
    spread = jnp.where(present, logp, 0.0).sum(-1) / jnp.maximum(present.sum(-1), 1)
    loss = -(1.0 - smoothing) * at_label - smoothing * spread
    return (weights * loss).sum(), weights.sum()


def token_cross_entropy(scores, labels, weights, *, smoothing: float = 0.0):
    """Sums the cross entropy over positions that have a label. [B, M, C], [B, M], [B]"""
    mask = weights[:, None] * (labels >= 0)  # [B, M]
    flat = scores.reshape(-1, scores.shape[-1])
    return cross_entropy(flat, labels.reshape(-1), mask.reshape(-1), smoothing=smoothing)


def binary_cross_entropy(scores, labels, weights, *, smoothing: float = 0.0, is_mean: bool = False):
    """Sums the binary cross entropies of the classes of each example, or takes their mean.

    scores [B, C]: the logit of each class, ABSENT = missing; labels [B], or [B, C] of 1 if a class
    is right, 0 if it is not, -1 if it is ignored. weights [B] -> (scalar, scalar)

    -log p and -log(1 - p) use log-sigmoids, since 1 - sigmoid rounds to 0 (DPT eq. 3).
    """
    scores = scores.astype(jnp.float32)
    if labels.ndim == 1:
        labels = jax.nn.one_hot(labels, scores.shape[1], dtype=jnp.int32)
    is_scored = (scores > 0.5 * ABSENT) & (labels >= 0)
    scores = jnp.where(is_scored, scores, 0.0)
    # Smoothed over two outcomes, right and wrong.
    target = (1.0 - smoothing) * (labels == 1) + 0.5 * smoothing
    loss = -target * jax.nn.log_sigmoid(scores) - (1.0 - target) * jax.nn.log_sigmoid(-scores)
    total = jnp.where(is_scored, loss, 0.0).sum(-1)
    if is_mean:
        total = total / jnp.maximum(is_scored.sum(-1), 1)
    return (weights * total).sum(), weights.sum()


def squared_error(scores, labels, weights):
    """Sums squared errors. [B, 1], float32 [B], [B] -> (scalar, scalar)"""
    # Scores of filling rows, of weight 0, may not be finite.
    error = jnp.where(weights > 0, scores[:, 0].astype(jnp.float32) - labels, 0.0)
    return (weights * error**2).sum(), weights.sum()


def span_loss(scores, labels, weights, *, smoothing: float = 0.0):
    """Sums the mean of the cross entropies of start and end. [B, M, 2], [B, M], [B]

    A label has START and END as bits; a row whose labels are all -1 has none.
    """
    has_label = weights * (labels >= 0).any(-1)
    bits = jnp.maximum(labels, 0)
    # The first token with the bit.
    ends = [((bits & bit) > 0).argmax(-1) for bit in (START, END)]
    sums = [
        cross_entropy(scores[..., i], end_labels, has_label, smoothing=smoothing)
        for i, end_labels in enumerate(ends)
    ]
    (first, count), (last, _) = sums
    return (first + last) / 2, count


def full_vocabulary(scores, labels, weights, *, smoothing: float = 0.0):
    """Sums -log p over the class columns of a full-vocabulary head; its last column is no class."""
    # Already normalised over the vocabulary, and must not be over these columns.
    return nll(scores[:, :-1], labels, weights, smoothing=smoothing)


def text_loss(logp, labels, weights):
    """Sums -log p over the tokens of free texts. [B, M], ABSENT = none, _, [B] -> scalar, scalar"""
    mask = weights[:, None] * (logp > 0.5 * ABSENT)
    return -jnp.where(mask > 0, logp * mask, 0.0).sum(), mask.sum()


def target_loss(scores, labels, weights):
    """Sums -log p over a pre-training head's targets. Arrays [B, M], _, [B] -> scalar, scalar"""
    return text_loss(scores.logp, labels, weights)


def count_hits(scores, labels, weights):
    """Counts the targets that are the most likely tokens. Scored, _, [B] -> {name: scalar}"""
    return {"hits": (_target_mask(scores, weights) * scores.hit).sum()}


def count_classes(scores, labels, weights):
    """Counts the examples whose best class is right, for scores as in `make_loss`."""
    return {"hits": (weights * (scores.argmax(-1) == labels)).sum()}


def count_replaced(scores, labels, weights):
    """Counts tokens: right, replaced, predicted as replaced, and both. Detected, _, [B]"""
    mask, predicted = _target_mask(scores, weights), scores.hit == scores.replaced
    counts = {"hits": scores.hit, "replaced": scores.replaced, "called": predicted}
    counts["found"] = predicted & scores.replaced
    return {name: (mask * counted).sum() for name, counted in counts.items()}


def _target_mask(scores, weights):
    return weights[:, None] * (scores.logp > 0.5 * ABSENT)  # [B, M]


def make_loss(scores: str, smoothing: float):
    """Returns the loss for a head's scores ("restricted" or "full")."""
    return partial(full_vocabulary if scores == "full" else cross_entropy, smoothing=smoothing)
