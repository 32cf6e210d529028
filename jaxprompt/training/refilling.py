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
    Rows,
    Search,
    add_room,
    best_texts,
    continue_rows,
    replace_rows,
    start_rows,
)
from jaxprompt.models.model import KeyValues, Model
from jaxprompt.parallel.sharding import Placement, with_placement
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch

_SHARE = 4  # rows are replaced when one in so many has finished


def can_refill(placement: Placement) -> bool:
    """Returns whether rows can be replaced: on one device, where no row is sent to another one."""
    return placement.mesh.size == 1


def make_start_step(model: Model, search: Search) -> Callable[..., Rows]:
    """Returns (trainable, frozen, batch) -> its rows, with their first tokens."""

    def step(trainable: Flat, frozen: Flat, batch: Batch, shared_kv: KeyValues | None = None):
        return start_rows(model, merge(trainable, frozen), batch, search, 0, shared_kv=shared_kv)

    return step


class Refilling(NamedTuple):
    """The programs that continue and replace rows."""

    layers: Callable  # (trainable, frozen) -> the layers that tokens run through
    open: Callable  # (rows) -> rows with room for tokens
    replace: Callable  # (rows, new rows, sources [B]) -> rows
    run: Callable  # (trainable, frozen, layers, rows, number) -> rows, ids [B, T], done [B]

    def __call__(
        self, trainable: Flat, frozen: Flat, started: Iterable[tuple[Any, Rows]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Continues the rows of all batches.

        Args:
          trainable: parameters.
          frozen: parameters.
          started: the example index of each row of a batch (-1 = padding), and its rows.

        Yields:
          The indices and the ids of finished rows, int [n] and [n, max_new_tokens].
        """
        layers = self.layers(trainable, frozen)
        index, rows, width = np.zeros(0, int), None, 0

        def run(max_running: int) -> tuple[np.ndarray, np.ndarray]:
            nonlocal rows
            rows, ids, done = self.run(trainable, frozen, layers, rows, np.int32(max_running))
            finished = (index >= 0) & np.asarray(done)
            result = index[finished], np.asarray(ids)[finished]
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

    def run(trainable: Flat, frozen: Flat, layers: Any, rows: Rows, max_running: Any):
        params = merge(trainable, frozen)
        rows = continue_rows(model, params, rows, search, max_running, layers=layers)
        return rows, best_texts(model, rows, search).ids, rows.chosen.done

    def compile_on(function: Callable, *donated: int) -> Callable:
        return jax.jit(with_placement(placement, function), donate_argnums=donated)

    return Refilling(
        compile_on(layers),
        compile_on(lambda rows: add_room(rows, search)),
        compile_on(lambda rows, new, sources: replace_rows(rows, new, sources, search), 0),
        compile_on(run, 3),
    )
