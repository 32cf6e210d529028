"""A stream of batches that goes on where a saved run stood."""

from collections.abc import Callable, Iterator, Mapping

from jaxprompt.errors import InputError
from jaxprompt.types import Batch

# grain's ranges have an end; no run gets there.
ENDLESS = 2**40


class BatchStream(Iterator[Batch]):
    """Batches by their number, made ahead by grain's threads."""

    def __init__(
        self, make: Callable[[int], Batch], total: int, prefetch: int, settings: dict[str, int],
        source: str,
    ):  # fmt: skip
        """Starts at batch 0 of `total`, of which `prefetch` are made ahead, 0 = as they are asked.

        `settings` is what the batches depend on besides their number; `source` says in messages
        what they are made of.
        """
        import grain

        self._settings, self._source = settings, source
        # Without threads grain makes batches where they are asked for.
        threads = grain.ReadOptions(num_threads=min(prefetch, 2), prefetch_buffer_size=prefetch)
        self._iterator = iter(grain.MapDataset.range(total).map(make).to_iter_dataset(threads))

    def __next__(self) -> Batch:
        """Returns the next batch."""
        return next(self._iterator)

    def get_state(self) -> dict[str, object]:
        """Returns the position, to be saved as JSON beside what it was trained with."""
        # The position counts batches handed out: those made ahead are made again.
        return {**self._settings, "iterator": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Goes to a saved position; raises InputError where the stream would not be the same."""
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise InputError(
                    f"the saved data position has {name} {state.get(name)}, this run has {value}; "
                    f"resume with the same {self._source} settings or take another workdir"
                )
        self._iterator.set_state(state["iterator"])

    def close(self) -> None:
        """Stops the prefetching threads."""
        self._iterator.close()
