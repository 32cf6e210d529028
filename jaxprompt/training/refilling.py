"""Text generation over the batches of a pass: the next rows take the places of finished ones.

Otherwise a batch would last as long as its longest text. The programs have static shapes: one reads
a batch and chooses the first token of its rows, one continues rows, and one replaces rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt.layers.cache import StackedLayers
from jaxprompt.models.generation import (
    Generated,
    Rows,
    Search,
    add_room,
    best_texts,
    continue_rows,
    replace_rows,
    start_rows,
)
from jaxprompt.models.model import KeyValues, Model
from jaxprompt.models.sampling import RowKeys
from jaxprompt.parallel.sharding import Placement, with_placement
from jaxprompt.tree import Flat, merge
from jaxprompt.types import NO_LIMIT, Batch

_SHARE = 4  # rows are replaced when one in so many has finished
_STEPS = 16  # tokens after which the host looks for stop strings


def can_refill(placement: Placement) -> bool:
    """Returns whether rows can be replaced: on one device, where no row is sent to another one."""
    return placement.mesh.size == 1


def make_start_step(model: Model, search: Search) -> Callable[..., Rows]:
    """Returns (trainable, frozen, batch) -> its rows, with their first tokens."""

    def step(
        trainable: Flat,
        frozen: Flat,
        batch: Batch,
        shared_kv: KeyValues | None = None,
        row_keys: RowKeys | None = None,
    ):
        params = merge(trainable, frozen)
        return start_rows(model, params, batch, search, 0, shared_kv=shared_kv, row_keys=row_keys)

    return step


class Refilling(NamedTuple):
    """The programs that continue and replace rows."""

    layers: Callable  # (trainable, frozen) -> the layers that tokens run through
    open: Callable  # (rows) -> rows with room for tokens
    replace: Callable  # (rows, new rows, sources [B]) -> rows
    # (trainable, frozen, layers, rows, stopped [B], rows that may go on, number of steps) -> rows,
    # their texts, done [B]
    run: Callable

    def __call__(
        self,
        trainable: Flat,
        frozen: Flat,
        started: Iterable[tuple[Any, Rows]],
        is_stopped: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Iterator[tuple[np.ndarray, Generated]]:
        """Continues the rows of all batches.

        Args:
          trainable: parameters.
          frozen: parameters.
          started: the example index of each row of a batch (-1 = padding), and its rows.
          is_stopped: returns whether texts end before their end token, by their ids so far, int
            [n, max_new_tokens] -> bool [n]. It is called every few tokens.

        Yields:
          The indices of finished rows, int [n], and their texts as numpy arrays.
        """
        layers = self.layers(trainable, frozen)
        index, rows, width = np.zeros(0, int), None, 0
        max_steps = np.int32(NO_LIMIT if is_stopped is None else _STEPS)

        def run(max_running: int) -> tuple[np.ndarray, Generated]:
            nonlocal rows
            done = index < 0
            while (~done).sum() > max_running:
                rows, texts, done = self.run(
                    trainable, frozen, layers, rows, done, np.int32(max_running), max_steps
                )
                done = np.array(done)
                if is_stopped is not None:
                    done[~done] = is_stopped(np.asarray(texts.ids)[~done])
            finished = (index >= 0) & done
            result = index[finished], jax.tree.map(lambda x: np.asarray(x)[finished], texts)
            index[finished] = -1
            return result

        for new_index, new in started:
            new_index = np.array(new_index)
            waiting = np.flatnonzero(new_index >= 0)
            new_width = _width(new)
            while len(waiting):
                is_free = index < 0
                if new_width > width and is_free.all():
                    index, rows, width = new_index, self.open(new), new_width
                    break
                if new_width > width:
                    yield run(0)
                    continue
                places = np.flatnonzero(is_free)[: len(waiting)]
                if len(places):
                    sources = np.full(len(index), -1, np.int32)
                    sources[places], waiting = np.split(waiting, [len(places)])
                    rows = self.replace(rows, new, sources)
                    index[places] = new_index[sources[places]]
                if len(waiting) or (index >= 0).all():
                    yield run(len(index) - max(1, len(index) // _SHARE))
            del new  # its memory is free before the next batch is read
        while (index >= 0).any():
            yield run(0)


def _width(rows: Rows) -> int:
    """Returns the columns of rows without room: those of all their caches."""
    cache = rows.cache
    cross = cache.cross[0].mask.shape[1] if cache.cross else 0
    return cache.positions.shape[1] + cross


def make_refilling(placement: Placement, model: Model, search: Search) -> Refilling:
    """Returns the programs, compiled once per shape."""

    def layers(trainable: Flat, frozen: Flat) -> Any:
        params = {"params": merge(trainable, frozen)["backbone"]}
        layers = model.backbone.bind(params).reading_layers()
        return () if isinstance(layers, StackedLayers) else layers

    def run(
        trainable: Flat,
        frozen: Flat,
        layers: Any,
        rows: Rows,
        stopped: Any,
        max_running: Any,
        max_steps: Any,
    ):
        params, chosen = merge(trainable, frozen), rows.chosen
        rows = rows._replace(chosen=chosen._replace(done=chosen.done | stopped))
        rows = continue_rows(model, params, rows, search, max_running, max_steps, layers=layers)
        return rows, best_texts(model, rows, search), rows.chosen.done

    def compile_on(function: Callable, *donated: int) -> Callable:
        return jax.jit(with_placement(placement, function), donate_argnums=donated)

    return Refilling(
        compile_on(layers),
        compile_on(lambda rows: add_room(rows, search)),
        compile_on(lambda rows, new, sources: replace_rows(rows, new, sources, search), 0),
        compile_on(run, 3),
    )
