"""Scores or generated texts of a whole split, in the order of its examples."""

import contextlib
import dataclasses
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
from jaxprompt.models.generation import Search, check_new_tokens
from jaxprompt.models.model import Model
from jaxprompt.parallel.compilation import cached_factory
from jaxprompt.parallel.sharding import Placement, put_batch, with_placement
from jaxprompt.training.refilling import Refilling, can_refill, make_refilling, make_start_step
from jaxprompt.training.steps import make_eval_step, make_generate_step
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch

_T = TypeVar("_T")
_COMPILE_THREADS = 2  # each needs some hundred MiB
# values of the config -> arguments of `generate`
_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


class EvalPass(NamedTuple):
    """An evaluation step with its parameters, for one pass over a split."""

    step: jax.stages.Wrapped  # (*params, batch, *shared_prefix) -> (example indices, results)
    put: Callable[[Batch], Batch]  # onto the devices
    params: tuple[Any, ...]
    shared_prefix: tuple[Any, ...]
    compiled_shapes: set[tuple[int, ...]]  # of token ids

    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the example index of each row (-1 = padding), and its result."""
        self.compiled_shapes.add(batch.encoder.ids.shape)
        return self.step(*self.params, self.put(batch), *self.shared_prefix)

    def compile(self, batch: Batch) -> None:
        """Compiles the step for batches of this shape."""
        self.step.lower(*self.params, self.put(batch), *self.shared_prefix).compile()


# Starts a pass: (trainable, frozen) -> a function of its batches.
StartPass = Callable[[Any, Any], EvalPass]


def compile_step(
    placement: Placement,
    step: Callable[..., Any],
    prefix_fn: Callable[[Flat, Flat], Any] | None = None,
) -> StartPass:
    """Compiles a step for batches that are distributed over the processes.

    `step` takes (trainable, frozen, batch) and the result of `prefix_fn(trainable, frozen)`, which
    is computed once for all batches of a pass. Every process gets the results of all rows.
    """

    def indexed_step(trainable: Flat, frozen: Flat, batch: Batch, *prefix: Any):
        return batch.index, step(trainable, frozen, batch, *prefix)

    def compile_replicated(function: Callable[..., Any]) -> jax.stages.Wrapped:
        # On every device, because a process cannot read the devices of another one.
        return jax.jit(with_placement(placement, function), out_shardings=placement.replicated)

    compiled_step = compile_replicated(indexed_step)
    compute_prefix = None if prefix_fn is None else compile_replicated(prefix_fn)
    compiled_shapes: set[tuple[int, ...]] = set()

    def start_pass(trainable: Flat, frozen: Flat) -> EvalPass:
        prefix = () if compute_prefix is None else (compute_prefix(trainable, frozen),)
        put = partial(put_batch, placement)
        return EvalPass(compiled_step, put, (trainable, frozen), prefix, compiled_shapes)

    return start_pass


@cached_factory
def scoring_step(placement: Placement, model: Model) -> StartPass:
    """Compiles the class scores, once for all equal models of a process."""
    return compile_step(placement, make_eval_step(model), shared_prefix_fn(model))


def shared_prefix_fn(model: Model) -> Callable[[Flat, Flat], Any] | None:
    """Returns a function (trainable, frozen) -> shared prefix of all rows; None without one."""
    if model.shared_prefix is None:
        return None
    return lambda trainable, frozen: model.run_shared_prefix(merge(trainable, frozen))


def dispatch_ahead(results: Iterable[_T], count: int = 2) -> Iterator[_T]:
    """Delays results, so that the device computes the next `count` while one is copied."""
    pending: deque[_T] = deque()
    for result in results:
        pending.append(result)
        if len(pending) > count:
            yield pending.popleft()
    yield from pending


@contextlib.contextmanager
def compile_in_parallel(step: Any, batches: Any) -> Iterator[Callable[[Batch], tuple[Any, Any]]]:
    """Compiles the shapes of a pass in parallel while its first batches run. Yields `step`.

    With several processes, whose compilers may wait for each other, and with batches that are not
    EvalBatches, shapes are compiled one after another.
    """
    first_batches = getattr(batches, "one_of_each_shape", None)
    if first_batches is None or not isinstance(step, EvalPass) or jax.process_count() > 1:
        yield step
        return
    # The first is compiled by the thread that runs it.
    uncompiled = list(first_batches(step.compiled_shapes))[1:]
    executor = ThreadPoolExecutor(_COMPILE_THREADS)
    pending = {b.encoder.ids.shape: executor.submit(step.compile, b) for b in uncompiled}

    def run(batch: Batch) -> tuple[Any, Any]:
        if (compiled := pending.pop(batch.encoder.ids.shape, None)) is not None:
            compiled.result()  # else it would be compiled twice
        return step(batch)

    try:
        yield run
    finally:
        executor.shutdown(cancel_futures=True)


def predict_scores(
    step: StartPass,
    trainable: Flat,
    frozen: Flat,
    batches: Iterable[Batch],
    size: int,
) -> np.ndarray:
    """Returns the scores of a split, float32 [size, C] or [size, M, C], row i = unit i."""
    scores, score_batch = None, step(trainable, frozen)
    with compile_in_parallel(score_batch, batches) as run:
        for index, value in dispatch_ahead(map(run, batches)):
            index, value = np.asarray(index), np.asarray(value, np.float32)
            if scores is None:
                # NaN marks an example that no batch contains.
                scores = np.full((size, *value.shape[1:]), np.nan, np.float32)
            scores[index[index >= 0]] = value[index >= 0]
    assert scores is not None  # a split has a batch
    return scores


def make_answer_fn(
    generates: bool,
    placement: Placement,
    model: Model,
    generation: GenerateConfig,
    tokenizer: Tokenizer,
    layout: Layout,
) -> Callable[[Flat, Flat, Iterable[Batch], int], Any]:
    """Returns (trainable, frozen, batches, units) -> scores or texts, compiled once per shape."""
    if generates:
        check = partial(check_new_tokens, model, max_new_tokens=generation.max_new_tokens)
        if not can_refill(placement):
            step = compile_generation(placement, generation, model, layout)
            return partial(write_texts, step, tokenizer, layout.ends, check=check)
        search = _search(generation, layout)
        start = make_start_step(model, search)
        step = compile_step(placement, start, shared_prefix_fn(model))
        refill = make_refilling(placement, model, search)
        return partial(write_texts, step, tokenizer, layout.ends, check=check, refill=refill)
    return partial(predict_scores, scoring_step(placement, model))


def compile_generation(
    placement: Placement, generation: GenerateConfig, model: Model, layout: Layout
) -> StartPass:
    """Compiles text generation, ids [B, max_new_tokens]."""
    return compile_step(
        placement, generation_step(generation, model, layout), shared_prefix_fn(model)
    )


def generation_step(
    generation: GenerateConfig, model: Model, layout: Layout
) -> Callable[..., jax.Array]:
    """Returns the generation step that `compile_generation` compiles."""
    settings = dataclasses.asdict(_search(generation, layout))
    return make_generate_step(model, eos=settings.pop("ends"), **settings)


def _search(generation: GenerateConfig, layout: Layout) -> Search:
    return Search(
        generation.max_new_tokens,
        layout.ends,
        layout.pad_id,
        generation.num_beams,
        generation.length_penalty,
        _EARLY_STOPPING[generation.early_stopping],
    )


def write_texts(
    step,
    tokenizer,
    ends,
    trainable,
    frozen,
    batches,
    size: int,
    *,
    check: Callable[[Batch], None] = lambda batch: None,
    refill: Refilling | None = None,
) -> list[str]:
    """Generates a text for every example of a split. Returns [size], without end tokens.

    `check` raises InputError for a batch without room for generated tokens. With `refill`, `step`
    only starts the texts of a batch.
    """
    texts, generate_batch = [""] * size, step(trainable, frozen)
    with compile_in_parallel(generate_batch, batches) as run:

        def checked(batch: Batch) -> tuple[Any, Any]:
            check(batch)
            return run(batch)

        results = map(checked, batches)
        for result in refill(trainable, frozen, results) if refill else dispatch_ahead(results, 1):
            index, ids = (np.asarray(part) for part in result)
            real = [i for i, row in enumerate(index) if row >= 0]
            # End tokens are not always special tokens of the tokenizer.
            without_ends = [row_ids[~np.isin(row_ids, ends)] for row_ids in ids[real]]
            decoded = tokenizer.batch_decode(without_ends, skip_special_tokens=True)
            for i, text in zip(index[real], decoded, strict=True):
                texts[i] = text.strip()
    return texts
