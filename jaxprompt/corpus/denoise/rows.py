"""The result of an objective for one row of text, and the random state of a row."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxprompt.corpus.denoise.pack import Fit
from jaxprompt.data.text.encoded import Encoded, Row
from jaxprompt.types import Role

Run = tuple[Sequence[int] | np.ndarray, Role]  # tokens in a row that share a role


class Text(NamedTuple):
    """One stream of one row, without padding. All arrays are [T]."""

    ids: np.ndarray  # int32
    roles: np.ndarray  # int8, Role
    segments: np.ndarray | None  # int32, from 1 on, 0 is left to padding; None = it is one text
    positions: np.ndarray  # int32, from 0 on in each segment


class Sample(NamedTuple):
    """One row, without padding."""

    encoder: Text
    label_pos: np.ndarray  # int32 [M] what is read, in the decoder where there is one
    targets: np.ndarray  # int32 [M] the token that each predicts
    decoder: Text | None = None


class Objective(Protocol):
    """Makes rows from pieces of documents: the input, and what is predicted."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Width of the arrays of each stream."""

    @property
    def reads(self) -> int:
        """Maximum number of tokens of a row that are predicted."""

    @property
    def fit(self) -> Fit:
        """The amount of text per row."""

    @property
    def tail(self) -> tuple[int, ...]:
        """Tokens after the last one of a document."""

    def __call__(self, pieces: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a row from pieces of documents."""


def row_rng(seed: int, index: int) -> np.random.RandomState:
    """Returns the random state of row `index`, independent of the order in which rows are made."""
    # RandomState's streams are frozen by numpy's policy, Generator's are not.
    return np.random.RandomState(np.random.Philox(key=np.array([seed, index], np.uint64)))


def own_part(size: int, share: tuple[int, int]) -> slice:
    """Returns which rows of a batch belong to part `share` (index, number of parts)."""
    host, hosts = share
    # Batch sizes divide over the processes, which the callers check.
    own = size // hosts
    return slice(host * own, (host + 1) * own)


def join(documents: Iterable[Sequence[Run]], apart: bool) -> Text:
    """Concatenates the runs of each document; with `apart` each document is a segment."""
    # numpy takes an empty tuple, as of a [CLS] that is not there, for float64.
    groups = [[run for run in document if len(run[0])] for document in documents]
    tokens, kinds = zip(*(run for group in groups for run in group), strict=True)
    ids = np.concatenate(tokens, dtype=np.int32)
    roles = np.array(kinds, np.int8).repeat([len(run) for run in tokens])
    segments, positions = None, np.arange(len(ids), dtype=np.int32)
    if apart:
        lengths = np.array([sum(len(ids) for ids, _ in group) for group in groups])
        segments = np.arange(1, len(groups) + 1, dtype=np.int32).repeat(lengths)
        positions -= (np.cumsum(lengths) - lengths).astype(np.int32).repeat(lengths)
    return Text(ids, roles, segments, positions)


def write(
    encoder: Text, targets: Sequence[np.ndarray], start: int, eos: int, apart: bool
) -> Sample:
    """Makes the decoder generate the target of each document and `eos`, token by token."""
    ends = [np.append(target, eos).astype(np.int32) for target in targets]
    # Shifted right by one: each place is fed the token in front of what it says.
    fed = join([[((start,), Role.SPECIAL), (t, Role.LABEL)] for t in targets], apart)
    said = np.concatenate(ends)
    return Sample(encoder, np.arange(len(said), dtype=np.int32), said, fed)


def encoded(sample: Sample) -> Encoded:
    """Converts a row to the form that batches take."""
    decoder = None if sample.decoder is None else _row(sample.decoder)
    row = _row(sample.encoder)._asdict()
    return Encoded(**row, label_pos=sample.label_pos, decoder=decoder, targets=sample.targets)


def _row(text: Text) -> Row:
    # No soft tokens: these rows pre-train or adapt the backbone itself.
    none = np.full(len(text.ids), -1, np.int32)
    types = np.zeros(len(text.ids), np.int32)
    return Row(text.ids, none, types, text.roles, text.positions, text.segments)
