"""Scores or texts of a whole split, in the split's own order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from jaxprompt.data.batching import Layout
from jaxprompt.heads import Kind
from jaxprompt.models.model import Model
from jaxprompt.parallel.compilation import shared
from jaxprompt.parallel.sharding import Placement, put_batch, within
from jaxprompt.training.steps import make_eval_step, make_generate_step
from jaxprompt.tree import Flat
from jaxprompt.types import Batch

_T = TypeVar("_T")
# A field of a config has one type, so the words stand for what `generate` takes.
_EARLY = {"true": True, "false": False, "never": "never"}


# (trainable, frozen, batch) -> which example each row is, -1 = none, and what was computed of it.
Step = Callable[[Flat, Flat, Batch], tuple[jax.Array, jax.Array]]


def place_step(placement: Placement, step: Callable[[Flat, Flat, Batch], jax.Array]) -> Step:
    """Compiles a step for batches of which every process has its part.

    Every process gets the results of all rows.
    """

    def whole(trainable: Flat, frozen: Flat, batch: Batch):
        return batch.index, step(trainable, frozen, batch)

    # On every device, since a process cannot read the parts of another one.
    compiled = jax.jit(within(placement, whole), out_shardings=placement.replicated)
    return lambda trainable, frozen, batch: compiled(trainable, frozen, put_batch(placement, batch))


@shared
def scoring_step(placement: Placement, model: Model) -> Step:
    """Compiles the scores of the classes, once for all equal models of a process."""
    return place_step(placement, make_eval_step(model))


def ahead(found: Iterable[_T], count: int = 2) -> Iterator[_T]:
    """Yields results late, so that the device works on the next `count` while one is copied."""
    waiting: deque[_T] = deque()
    for result in found:
        waiting.append(result)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def predict_scores(
    step: Step,
    trainable: Flat,
    frozen: Flat,
    batches: Iterable[Batch],
    size: int,
) -> np.ndarray:
    """Scores every unit of a split. -> float32 [size, C] or [size, M, C], row i = unit i"""
    scores = None
    for index, value in ahead(step(trainable, frozen, batch) for batch in batches):
        index, value = np.asarray(index), np.asarray(value, np.float32)
        if scores is None:
            # NaN, so that a unit which no batch holds cannot pass for one with a score.
            scores = np.full((size, *value.shape[1:]), np.nan, np.float32)
        scores[index[index >= 0]] = value[index >= 0]
    return scores


def make_answering(
    head: Kind, placement: Placement, model: Model, how: Mapping[str, Any], tokenizer: Any,
    layout: Layout,
) -> Callable[[Flat, Flat, Iterable[Batch], int], Any]:  # fmt: skip
    """Makes (trainable, frozen, batches, units) -> scores or texts of all, compiled once a shape.

    `how` is the `generate` block of a config or card.
    """
    if head.WRITES:
        step = make_writer(placement, how, model, layout)
        return partial(write_texts, step, tokenizer)
    return partial(predict_scores, scoring_step(placement, model))


def make_writer(placement: Placement, how: Mapping[str, Any], model: Model, layout: Layout) -> Step:
    """Compiles the writing of texts by the `generate` block of a config or card. -> [B, max_new]"""
    settings = dict(how, eos=layout.stop_id, pad=layout.pad_id)
    settings["early_stopping"] = _EARLY[settings["early_stopping"]]
    return place_step(placement, make_generate_step(model, **settings))


def write_texts(step, tokenizer, trainable, frozen, batches, size: int) -> list[str]:
    """Writes a text for every example of a split, in its order. -> [size]"""
    texts = [""] * size
    for found in ahead((step(trainable, frozen, batch) for batch in batches), 1):
        index, ids = (np.asarray(part) for part in found)
        rows = [i for i, row in enumerate(index) if row >= 0]
        written = tokenizer.batch_decode(ids[rows], skip_special_tokens=True)
        for i, text in zip(index[rows], written, strict=True):
            texts[i] = text.strip()
    return texts
