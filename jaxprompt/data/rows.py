"""The rows of a split, wherever they come from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload


class Rows(Sequence[dict[str, Any]]):
    """The rows of one split in their order. Random access; what can stay on disk stays there."""

    def __init__(
        self,
        data: Any,
        path: str,
        lines: Sequence[int] | None = None,
        convert: Callable[[Any], dict[str, Any]] | None = None,
        classes: Sequence[str] = (),
        features: Mapping[str, Any] | None = None,
        numbers: Sequence[int] | None = None,
        total: int | None = None,
    ):
        """Wraps `data` (a list or a data set with random access) that was read from `path`.

        `lines` holds the line number of each row, else rows count from 1; `convert` makes a raw
        row a dict; `classes` are the names of the data set's own classes, by its numbers, and
        `features` the kinds of a file's columns where `datasets` has written them there. Of rows
        that were chosen or made of others, `numbers` has which of the `total` that were read each
        one is of, from 0.
        """
        self.path = path
        self.classes, self.features = tuple(classes), features
        self._data = data
        self._lines = lines
        self._convert = convert
        self._numbers = numbers
        self.total = len(data) if total is None else total
        self.left_out = 0  # rows without a label, which `read_split` leaves out

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> "Rows": ...

    def __getitem__(self, index: int | slice) -> "dict[str, Any] | Rows":
        """Row `index`, or the rows of a slice."""
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        row = self._data[int(index)]
        return self._convert(row) if self._convert else row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows in order, as the data set itself reads them best."""
        return map(self._convert, self._data) if self._convert else iter(self._data)

    def take(self, indices: Sequence[int]) -> "Rows":
        """The rows at `indices`; each keeps its origin."""
        lines = [self._lines[i] if self._lines else i + 1 for i in indices]
        numbers = [self.number(i) for i in indices]
        rows = [self[i] for i in indices]
        return Rows(rows, self.path, lines, None, self.classes, None, numbers, self.total)

    def named(self, convert: Callable[[Any], dict[str, Any]], classes: Sequence[str]) -> "Rows":
        """The same rows as `convert` makes them, whose numbers of classes are then these names."""
        more = convert, classes, None, self._numbers, self.total
        return Rows(self, self.path, self._lines, *more)

    def expand(self, make: Callable[[int, dict[str, Any]], list[dict[str, Any]]]) -> "Rows":
        """The rows that `make` gives for each row and its number; they have its origin."""
        rows, lines, numbers = [], [], []
        for number, row in enumerate(self):
            made = make(number, row)
            rows += made
            numbers += [self.number(number)] * len(made)
            lines += [self._lines[number] if self._lines else number + 1] * len(made)
        return Rows(rows, self.path, lines, None, self.classes, None, numbers, self.total)

    def number(self, index: int) -> int:
        """Which of the rows that were read row `index` is of, from 0."""
        return self._numbers[index] if self._numbers else index

    def origin(self, index: int) -> str:
        """Where row `index` stands, as "path:line"."""
        return f"{self.path}:{self._lines[index] if self._lines else index + 1}"
