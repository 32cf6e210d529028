"""Scores or generated texts of a whole split, in the order of its examples."""

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxprompt.config.run import GenerateConfig
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.text.decoding import TextDecoder, stop_ids
from jaxprompt.data.text.encoded import GeneratedText, Predictions
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.models.generation import Generated, Search, check_new_tokens
from jaxprompt.models.model import Model
from jaxprompt.models.sampling import RowKeys, Sampling, make_row_keys
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

    step: jax.stages.Wrapped  # (*params, batch, *constants) -> (example indices, results)
    put: Callable[[Batch], Batch]  # onto the devices
    params: tuple[Any, ...]
    constants: tuple[Any, ...]  # of the pass: the shared prefix, then inputs such as keys
    compiled_shapes: set[tuple[int, ...]]  # of token ids

    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the example index of each row (-1 = padding), and its result."""
        self.compiled_shapes.add(batch.encoder.ids.shape)
        return self.step(*self.params, self.put(batch), *self.constants)

    def compile(self, batch: Batch) -> None:
        """Compiles the step for batches of this shape."""
        self.step.lower(*self.params, self.put(batch), *self.constants).compile()


# Starts a pass: (trainable, frozen, *inputs) -> a function of its batches.
StartPass = Callable[..., EvalPass]


def compile_step(
    placement: Placement,
    step: Callable[..., Any],
    prefix_fn: Callable[[Flat, Flat], Any] | None = None,
) -> StartPass:
    """Compiles a step for batches that are distributed over the processes.

    `step` takes (trainable, frozen, batch), the result of `prefix_fn(trainable, frozen)`, which is
    computed once for all batches of a pass, and other inputs of the pass. Every process gets the
    results of all rows.
    """

    def indexed_step(trainable: Flat, frozen: Flat, batch: Batch, *constants: Any):
        return batch.index, step(trainable, frozen, batch, *constants)

    def compile_replicated(function: Callable[..., Any]) -> jax.stages.Wrapped:
        # On every device, because a process cannot read the devices of another one.
        return jax.jit(with_placement(placement, function), out_shardings=placement.replicated)

    compiled_step = compile_replicated(indexed_step)
    compute_prefix = None if prefix_fn is None else compile_replicated(prefix_fn)
    compiled_shapes: set[tuple[int, ...]] = set()

    def start_pass(trainable: Flat, frozen: Flat, *inputs: Any) -> EvalPass:
        prefix = None if compute_prefix is None else compute_prefix(trainable, frozen)
        constants = () if prefix is None and not inputs else (prefix, *inputs)
        put = partial(put_batch, placement)
        return EvalPass(compiled_step, put, (trainable, frozen), constants, compiled_shapes)

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
) -> Callable[..., Predictions]:
    """Returns (trainable, frozen, batches, units) -> scores or texts, compiled once per shape.

    For texts the units are samples, and the function also takes `first`, see `TextWriter`.
    """
    if not generates:
        return partial(predict_scores, scoring_step(placement, model))
    ends = (*layout.ends, *stop_ids(tokenizer, generation.stop))
    search = make_search(generation, dataclasses.replace(layout, ends=ends))
    decoder = TextDecoder(tokenizer, ends, generation.stop)
    return TextWriter(placement, model, search, generation, decoder)


def make_search(generation: GenerateConfig, layout: Layout) -> Search:
    """Returns the search of a config, which ends texts at the end ids of a layout."""
    return Search(
        generation.max_new_tokens,
        layout.ends,
        layout.pad_id,
        generation.num_beams,
        generation.length_penalty,
        _EARLY_STOPPING[generation.early_stopping],
        Sampling(
            generation.temperature,
            generation.top_k,
            generation.top_p,
            generation.min_p,
            generation.repetition_penalty,
        ),
    )


def generation_step(model: Model, search: Search) -> Callable[..., Generated]:
    """Returns the step that generates the texts of a batch as `search` says."""
    settings = {field.name: getattr(search, field.name) for field in dataclasses.fields(search)}
    return make_generate_step(model, eos=settings.pop("ends"), **settings)


@dataclasses.dataclass(frozen=True)
class TextWriter:
    """Generates texts. Its programs are compiled once per shape of a batch."""

    placement: Placement
    model: Model
    search: Search
    generation: GenerateConfig
    decoder: TextDecoder

    @functools.cached_property
    def _steps(self) -> tuple[StartPass, Refilling]:
        """The step that starts the texts of a batch, and the programs that continue them."""
        return continuing_programs(self.placement, self.model, self.search)

    @functools.cached_property
    def _whole(self) -> StartPass:
        """The step that generates the whole texts of a batch."""
        return whole_program(self.placement, self.model, self.search)

    def __call__(
        self, trainable: Flat, frozen: Flat, batches: Iterable[Batch], size: int, *, first: int = 0
    ) -> list[tuple[GeneratedText, ...]]:
        """Generates a text for every row of a split.

        Args:
          trainable: parameters.
          frozen: parameters.
          batches: the rows, `generation.n` next to each other for each example.
          size: number of rows.
          first: number of the first example in the whole input, which the random keys depend on.

        Returns:
          The samples of each example.

        Raises:
          InputError: for a batch without room for the generated tokens.
        """
        generation, refills = self.generation, can_refill(self.placement)
        texts = [GeneratedText("")] * size
        step = self._steps[0] if refills else self._whole
        generate_batch = step(trainable, frozen, *self._inputs(first))
        with compile_in_parallel(generate_batch, batches) as run:

            def checked(batch: Batch) -> tuple[Any, Any]:
                check_new_tokens(self.model, batch, generation.max_new_tokens)
                return run(batch)

            results: Iterable[tuple[Any, Generated]]
            if refills:
                is_stopped = self.decoder.is_stopped if self.decoder.stop else None
                results = self._steps[1](trainable, frozen, map(checked, batches), is_stopped)
            else:
                results = dispatch_ahead(map(checked, batches), 1)
            for index, written in results:
                index, written = np.asarray(index), jax.tree.map(np.asarray, written)
                is_row = index >= 0
                logprobs = written.logprobs[is_row] if generation.logprobs else None
                decoded = self.decoder.decode(
                    written.ids[is_row], written.lengths[is_row], logprobs
                )
                for i, text in zip(index[is_row], decoded, strict=True):
                    texts[i] = text
        return [tuple(texts[i : i + generation.n]) for i in range(0, size, generation.n)]

    def stream(self, trainable: Flat, frozen: Flat, batch: Batch) -> Iterator[str]:
        """Yields the pieces of the text of a batch's first row; they do not change any more."""
        start, programs = self._steps
        _, rows = start(trainable, frozen, *self._inputs(0))(batch)
        layers, rows, shown = programs.layers(trainable, frozen), programs.open(rows), ""
        none, max_steps = np.zeros(len(batch.weights), bool), 0  # at first only the first token
        is_done = False
        while not is_done:
            rows, written, done = programs.run(
                trainable, frozen, layers, rows, none, np.int32(0), np.int32(max_steps)
            )
            ids, max_steps = np.asarray(written.ids[:1]), 1
            is_done = bool(done[0]) or bool(self.decoder.is_stopped(ids)[0])
            text = self.decoder.final_part(ids[0], is_done)
            if text.startswith(shown) and text != shown:
                yield text[len(shown) :]
                shown = text

    def _inputs(self, first: int) -> tuple[RowKeys, ...]:
        generation = self.generation
        keys = make_row_keys(generation.seed, first, generation.n)
        return (keys,) if generation.temperature else ()


@cached_factory
def whole_program(placement: Placement, model: Model, search: Search) -> StartPass:
    """Compiles the step that generates whole texts, once for all equal models."""
    return compile_step(placement, generation_step(model, search), shared_prefix_fn(model))


@cached_factory
def continuing_programs(
    placement: Placement, model: Model, search: Search
) -> tuple[StartPass, Refilling]:
    """Compiles the programs that start and continue texts, once for all equal models."""
    start = compile_step(placement, make_start_step(model, search), shared_prefix_fn(model))
    return start, make_refilling(placement, model, search)
