"""The rows of a split, from any source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload


class Rows(Sequence[dict[str, Any]]):
    """The rows of one split, in order, with random access; data sets on disk stay on disk."""

    def __init__(
        self,
        data: Any,
        path: str,
        lines: Sequence[int] | None = None,
        convert: Callable[[Any], dict[str, Any]] | None = None,
        classes: Sequence[str] = (),
        features: Mapping[str, Any] | None = None,
        source_indices: Sequence[int] | None = None,
        total: int | None = None,
    ):
        """Wraps `data` (a list or a data set with random access) that was read from `path`.

        Args:
          data: the rows, as they were read.
          path: where they were read from, for messages.
          lines: line number of each row; by default rows count from 1.
          convert: makes a dict of a row of `data`.
          classes: the data set's class names, by index.
          features: types of the columns, if `datasets` or TFDS has written them there.
          source_indices: for selected or expanded rows, the index (from 0) of the row that each
            comes from.
          total: number of rows that were read.
        """
        self.path = path
        self.classes, self.features = tuple(classes), features
        self._data = data
        self._convert = convert
        self._lines = range(1, len(data) + 1) if lines is None else lines
        self._source_indices = range(len(data)) if source_indices is None else source_indices
        self.total = len(data) if total is None else total
        self.left_out = 0  # number of rows without a label, which `read_split` leaves out

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> "Rows": ...

    def __getitem__(self, index: int | slice) -> "dict[str, Any] | Rows":
        """Returns one row, or the rows of a slice."""
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        row = self._data[int(index)]
        return self._convert(row) if self._convert else row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates over all rows in order, as the data set reads them fastest."""
        return map(self._convert, self._data) if self._convert else iter(self._data)

    def select(self, indices: Sequence[int]) -> "Rows":
        """Returns the rows at `indices`; each keeps its origin."""
        rows = [self[i] for i in indices]
        return self._made_of(rows, indices)

    def named(self, convert: Callable[[Any], dict[str, Any]], classes: Sequence[str]) -> "Rows":
        """Returns the rows converted by `convert`, with `classes` as the names of their classes."""
        return Rows(
            self, self.path, self._lines, convert, classes, None, self._source_indices, self.total
        )

    def expand(self, make: Callable[[int, dict[str, Any]], list[dict[str, Any]]]) -> "Rows":
        """Returns the rows that `make` makes of each index and row; they keep its origin."""
        rows: list[dict[str, Any]] = []
        indices: list[int] = []
        for i, row in enumerate(self):
            new_rows = make(i, row)
            rows += new_rows
            indices += [i] * len(new_rows)
        return self._made_of(rows, indices)

    def _made_of(self, rows: list[dict[str, Any]], indices: Sequence[int]) -> "Rows":
        """Returns `rows`; the i-th was made from the row `indices[i]` of this split."""
        lines = [self._lines[i] for i in indices]
        source_indices = [self._source_indices[i] for i in indices]
        return Rows(rows, self.path, lines, None, self.classes, None, source_indices, self.total)

    def source_index(self, index: int) -> int:
        """Returns the index, among the rows that were read, of the row that row `index` is from."""
        return self._source_indices[index]

    def origin(self, index: int) -> str:
        """Returns where row `index` was read from, as "path:line"."""
        return f"{self.path}:{self._lines[index]}"
