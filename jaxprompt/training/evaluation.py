"""Scores of a whole split, in the split's own order, and its metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxprompt.errors import InputError
from jaxprompt.models.model import Model
from jaxprompt.parallel.sharding import Placement, put_batch, within
from jaxprompt.training import metrics
from jaxprompt.training.steps import make_generate_step
from jaxprompt.tree import Flat
from jaxprompt.types import Batch

_EARLY = {"true": True, "false": False, "never": "never"}


# (trainable, frozen, batch) -> which example each row is, -1 = none, and what was computed of it.
Step = Callable[[Flat, Flat, Batch], tuple[jax.Array, jax.Array]]


def place_step(placement: Placement, step: Callable[[Flat, Flat, Batch], jax.Array]) -> Step:
    """Compiles a step for batches of which every process has its part.

    Every process gets the results of all rows.
    """

    def whole(trainable: Flat, frozen: Flat, batch: Batch):
        return batch.index, step(trainable, frozen, batch)

    compiled = jax.jit(within(placement, whole), out_shardings=placement.replicated)
    return lambda trainable, frozen, batch: compiled(trainable, frozen, put_batch(placement, batch))


def predict_scores(
    step: Step,
    trainable: Flat,
    frozen: Flat,
    batches: Iterable[Batch],
    size: int,
) -> np.ndarray:
    """Scores every example of a split. -> float32 [size, C], row i = example i"""
    scores, waiting = None, []

    def collect(pending):
        nonlocal scores
        index, value = np.asarray(pending[0]), np.asarray(pending[1], np.float32)
        if scores is None:
            scores = np.full((size, value.shape[1]), np.nan, np.float32)
        scores[index[index >= 0]] = value[index >= 0]

    for batch in batches:
        waiting.append(step(trainable, frozen, batch))
        if len(waiting) > 2:  # the device works on the next batches while this one is copied
            collect(waiting.pop(0))
    for pending in waiting:
        collect(pending)
    return scores


def decide(scores: np.ndarray, classes: int) -> np.ndarray:
    """Picks each row's best class; -1 where a piece outside the verbalizer is better. -> [B]"""
    best = scores[:, :classes].argmax(-1)
    if scores.shape[1] > classes:
        best = np.where(scores[:, classes] > scores[:, :classes].max(-1), -1, best)
    return best


def probabilities(scores: np.ndarray, classes: int) -> np.ndarray:
    """Turns class scores into probabilities over the classes. [B, C or C + 1] -> [B, C]"""
    scores = scores[:, :classes] - scores[:, :classes].max(-1, keepdims=True)
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


def name_scores(
    scores: np.ndarray, names: Iterable[Sequence[str]], classes: int
) -> Iterator[dict[str, Any]]:
    """Yields the prediction, its score and the scores of all classes of each example.

    `scores` are those of `drop_absent` [B, C or C + 1], `names` the classes of each example. The
    prediction is the best of the classes, whatever the model says outside them.
    """
    best = decide(scores[:, :classes], classes)
    for own, values, index in zip(names, probabilities(scores, classes), best, strict=True):
        known = dict(zip(own, map(float, values), strict=False))
        yield {"prediction": own[index], "score": float(values[index]), "scores": known}


def drop_absent(scores: np.ndarray, counts: np.ndarray, classes: int) -> np.ndarray:
    """Takes out the classes that an example does not have. [B, C or C + 1], [B] -> the same"""
    column = np.arange(scores.shape[1])
    return np.where((column >= counts[:, None]) & (column < classes), -np.inf, scores)


def evaluate(step, trainable, frozen, batches, labels, counts, metric: str, classes: int):
    """Scores a split and measures it; labels and counts are [examples]. -> (metrics, scores)

    Raises InputError where the scores of an example are NaN: no class is the best of them.
    """
    scores = predict_scores(step, trainable, frozen, batches, len(labels))
    broken = np.flatnonzero(np.isnan(scores).any(-1))
    if broken.size:
        raise InputError(
            f"the scores of {broken.size} of {len(labels)} examples are NaN, the first of them of "
            f"example {broken[0] + 1}; the trained numbers are too large for this backbone: lower "
            "optim.lr, set optim.clip, or take backbone.dtype=float32"
        )
    scores = drop_absent(scores, counts, classes)
    return metrics.score(metric, labels, decide(scores, classes), classes), scores


def make_writer(
    placement: Placement, how: Mapping[str, Any], model: Model, tokenizer: Any, pad: int
) -> Step:
    """Compiles the writing of texts by the `generate` block of a config or card. -> [B, max_new]"""
    settings = dict(how, eos=tokenizer.eos_token_id, pad=pad)
    settings["early_stopping"] = _EARLY[settings["early_stopping"]]
    return place_step(placement, make_generate_step(model, **settings))


def write_texts(step, trainable, frozen, batches, size: int, tokenizer) -> list[str]:
    """Writes a text for every example of a split, in its order. -> [size]"""
    texts, waiting = [""] * size, []

    def collect(pending):
        index, ids = (np.asarray(part) for part in pending)
        rows = [i for i, row in enumerate(index) if row >= 0]
        written = tokenizer.batch_decode(ids[rows], skip_special_tokens=True)
        for i, text in zip(index[rows], written, strict=True):
            texts[i] = text.strip()

    for batch in batches:
        waiting.append(step(trainable, frozen, batch))
        if len(waiting) > 1:
            collect(waiting.pop(0))
    for pending in waiting:
        collect(pending)
    return texts
