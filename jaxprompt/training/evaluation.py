"""Scores or generated texts of a whole split, in the order of its examples."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxprompt.config.run import GenerateConfig
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.heads import Kind
from jaxprompt.models.generation import check_new_tokens
from jaxprompt.models.model import Model
from jaxprompt.parallel.compilation import shared
from jaxprompt.parallel.sharding import Placement, put_batch, within
from jaxprompt.training.steps import make_eval_step, make_generate_step
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch

_T = TypeVar("_T")
_COMPILERS = 2  # at once; each takes some hundred MiB
# A field of a config has one type, so the words stand for what `generate` takes.
_EARLY = {"true": True, "false": False, "never": "never"}


class Pass(NamedTuple):
    """An evaluation step with its parameters, for one pass over a split."""

    run: jax.stages.Wrapped  # -> which example each row is, what was computed of it
    place: Callable[[Batch], Batch]
    given: tuple[Any, ...]  # in front of the batch
    begun: tuple[Any, ...]  # behind it
    known: set[tuple[int, ...]]  # shapes of tokens that `run` is compiled for

    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the example index of each row (-1 = padding), and its result."""
        self.known.add(batch.encoder.ids.shape)
        return self.run(*self.given, self.place(batch), *self.begun)

    def compile(self, batch: Batch) -> None:
        """Compiles the step for batches of this shape."""
        self.run.lower(*self.given, self.place(batch), *self.begun).compile()


# Begins a pass: (trainable, frozen) -> a function of its batches.
Step = Callable[[Flat, Flat], Pass]


def place_step(
    placement: Placement, step: Callable[..., jax.Array],
    begin: Callable[[Flat, Flat], Any] | None = None,
) -> Step:  # fmt: skip
    """Compiles a step for batches that are distributed over the processes.

    `step` takes (trainable, frozen, batch) and the result of `begin(trainable, frozen)`, which is
    computed once for all batches of a pass. Every process gets the results of all rows.
    """

    def whole(trainable: Flat, frozen: Flat, batch: Batch, *begun: Any):
        return batch.index, step(trainable, frozen, batch, *begun)

    # On every device, since a process cannot read the parts of another one.
    compile_ = lambda made: jax.jit(within(placement, made), out_shardings=placement.replicated)
    each, first = compile_(whole), None if begin is None else compile_(begin)
    known: set[tuple[int, ...]] = set()

    def start(trainable: Flat, frozen: Flat) -> Pass:
        begun = () if first is None else (first(trainable, frozen),)
        return Pass(each, partial(put_batch, placement), (trainable, frozen), begun, known)

    return start


@shared
def scoring_step(placement: Placement, model: Model) -> Step:
    """Compiles the class scores, once for all equal models of a process."""
    return place_step(placement, make_eval_step(model), begin_pass(model))


def begin_pass(model: Model) -> Callable[[Flat, Flat], Any] | None:
    """Returns a function (trainable, frozen) -> shared prefix of all rows; None without one."""
    if model.shared_prefix is None:
        return None
    return lambda trainable, frozen: model.run_shared_prefix(merge(trainable, frozen))


def ahead(found: Iterable[_T], count: int = 2) -> Iterator[_T]:
    """Delays results, so that the device computes the next `count` while one is copied."""
    waiting: deque[_T] = deque()
    for result in found:
        waiting.append(result)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


@contextlib.contextmanager
def compiling(score: Any, batches: Any) -> Iterator[Callable[[Batch], tuple[Any, Any]]]:
    """Compiles the shapes of a pass in parallel while its first batches run. Yields `score`.

    With several processes, whose compilers may wait for each other, and with batches that are not
    EvalBatches, shapes are compiled one after another.
    """
    firsts = getattr(batches, "firsts", None)
    if firsts is None or not isinstance(score, Pass) or jax.process_count() > 1:
        yield score
        return
    # The first is compiled by the thread that runs it.
    new = list(firsts(score.known))[1:]
    pool = ThreadPoolExecutor(_COMPILERS)
    pending = {batch.encoder.ids.shape: pool.submit(score.compile, batch) for batch in new}

    def run(batch: Batch) -> tuple[Any, Any]:
        if (compiled := pending.pop(batch.encoder.ids.shape, None)) is not None:
            compiled.result()  # else it would be compiled twice
        return score(batch)

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


def predict_scores(
    step: Step,
    trainable: Flat,
    frozen: Flat,
    batches: Iterable[Batch],
    size: int,
) -> np.ndarray:
    """Returns the scores of a split, float32 [size, C] or [size, M, C], row i = unit i."""
    scores, score = None, step(trainable, frozen)
    with compiling(score, batches) as run:
        for index, value in ahead(map(run, batches)):
            index, value = np.asarray(index), np.asarray(value, np.float32)
            if scores is None:
                # NaN, so that a unit which no batch holds cannot pass for one with a score.
                scores = np.full((size, *value.shape[1:]), np.nan, np.float32)
            scores[index[index >= 0]] = value[index >= 0]
    if scores is None:
        raise ValueError("there is no batch to score")
    return scores


def make_answering(
    head: Kind, placement: Placement, model: Model, generation: GenerateConfig,
    tokenizer: Tokenizer, layout: Layout,
) -> Callable[[Flat, Flat, Iterable[Batch], int], Any]:  # fmt: skip
    """Returns (trainable, frozen, batches, units) -> scores or texts, compiled once per shape."""
    if head.WRITES:
        step = make_writer(placement, generation, model, layout)
        fits = partial(check_new_tokens, model, max_new_tokens=generation.max_new_tokens)
        return partial(write_texts, step, tokenizer, layout.ends, check=fits)
    return partial(predict_scores, scoring_step(placement, model))


def make_writer(
    placement: Placement, generation: GenerateConfig, model: Model, layout: Layout
) -> Step:
    """Compiles text generation, ids [B, max_new_tokens]."""
    return place_step(placement, make_writing(generation, model, layout), begin_pass(model))


def make_writing(
    generation: GenerateConfig, model: Model, layout: Layout
) -> Callable[..., jax.Array]:
    """Returns the generation step that `make_writer` compiles."""
    settings = {
        **generation.to_dict(),
        "early_stopping": _EARLY[generation.early_stopping],
        "eos": layout.ends,
        "pad": layout.pad_id,
    }
    return make_generate_step(model, **settings)


def write_texts(
    step, tokenizer, ends, trainable, frozen, batches, size: int, *,
    check: Callable[[Batch], None] = lambda batch: None,
) -> list[str]:  # fmt: skip
    """Generates a text for every example of a split. Returns [size], without end tokens.

    `check` raises InputError for a batch without room for generated tokens.
    """
    texts, write = [""] * size, step(trainable, frozen)
    with compiling(write, batches) as run:

        def fitting(batch: Batch) -> tuple[Any, Any]:
            check(batch)
            return run(batch)

        for found in ahead(map(fitting, batches), 1):
            index, ids = (np.asarray(part) for part in found)
            rows = [i for i, row in enumerate(index) if row >= 0]
            # An end need not be a special token of the tokenizer.
            plain = [own[~np.isin(own, ends)] for own in ids[rows]]
            written = tokenizer.batch_decode(plain, skip_special_tokens=True)
            for i, text in zip(index[rows], written, strict=True):
                texts[i] = text.strip()
    return texts
