"""A stream of batches that resumes at a saved position."""

from collections.abc import Callable, Iterator, Mapping

from jaxprompt.errors import InputError
from jaxprompt.types import Batch

# grain's ranges have an end; no run gets there.
ENDLESS = 2**40


class BatchStream(Iterator[Batch]):
    """Batches by their number, prefetched by grain's threads."""

    def __init__(
        self,
        make: Callable[[int], Batch],
        total: int,
        prefetch: int,
        settings: dict[str, int],
        source: str,
    ):
        """Starts at batch 0.

        Args:
          make: makes a batch of its number.
          total: number of batches.
          prefetch: batches made ahead, 0 = none.
          settings: what the batches depend on besides their number.
          source: what the batches are made from, for messages.
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
        """Returns the position, to be saved as JSON with the settings that it depends on."""
        # The position counts batches handed out: those made ahead are made again.
        return {**self._settings, "iterator": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Moves to a saved position; raises InputError if the stream would be different."""
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise InputError(
                    f"the saved data position has {name} {state.get(name)}, but this run has "
                    f"{value}; resume with the same {self._source} settings, or use another workdir"
                )
        self._iterator.set_state(state["iterator"])

    def close(self) -> None:
        """Stops the prefetching threads."""
        self._iterator.close()
