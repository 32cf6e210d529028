"""The training sample that an objective makes of text, and its random state."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxprompt.corpus.denoise.pack import Capacity
from jaxprompt.data.text.encoded import Encoded, Row
from jaxprompt.types import Role

Run = tuple[Sequence[int] | np.ndarray, Role]  # consecutive tokens of the same role


class TokenStream(NamedTuple):
    """One stream of a sample, without padding. All arrays are [T]."""

    ids: np.ndarray  # int32
    roles: np.ndarray  # int8, Role
    segments: np.ndarray | None  # int32, from 1 on, 0 is left to padding; None = a single text
    positions: np.ndarray  # int32, from 0 on in each segment


class Sample(NamedTuple):
    """One training sample, without padding."""

    encoder: TokenStream
    label_pos: np.ndarray  # int32 [M] positions that predict, in the decoder if there is one
    targets: np.ndarray  # int32 [M] the token that each predicts
    decoder: TokenStream | None = None


class DenoisingObjective(Protocol):
    """Makes samples from chunks of documents: the input and the targets."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Width of the arrays of each stream."""

    @property
    def max_targets(self) -> int:
        """Maximum number of tokens of a sample that are predicted."""

    @property
    def capacity(self) -> Capacity:
        """The amount of text per sample."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens after the last one of a document."""

    def __call__(self, chunks: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a sample from chunks of documents."""


def sample_rng(seed: int, index: int) -> np.random.RandomState:
    """Returns the random state of sample `index`, independent of the order of the samples."""
    # RandomState's streams are frozen by numpy's policy, Generator's are not.
    return np.random.RandomState(np.random.Philox(key=np.array([seed, index], np.uint64)))


def process_slice(size: int, share: tuple[int, int]) -> slice:
    """Returns the samples of a batch that belong to part `share` (index, number of parts)."""
    host, hosts = share
    # Callers check that the batch size is divisible by the number of processes.
    host_size = size // hosts
    return slice(host * host_size, (host + 1) * host_size)


def join_documents(documents: Iterable[Sequence[Run]], separate: bool) -> TokenStream:
    """Concatenates the runs of each document; with `separate` each document is a segment."""
    # Without empty runs, such as a missing [CLS]: numpy takes an empty tuple for float64.
    documents = [[run for run in document if len(run[0])] for document in documents]
    tokens, run_roles = zip(*(run for document in documents for run in document), strict=True)
    ids = np.concatenate(tokens, dtype=np.int32)
    roles = np.array(run_roles, np.int8).repeat([len(run) for run in tokens])
    segments, positions = None, np.arange(len(ids), dtype=np.int32)
    if separate:
        lengths = np.array([sum(len(ids) for ids, _ in document) for document in documents])
        segments = np.arange(1, len(documents) + 1, dtype=np.int32).repeat(lengths)
        positions -= (np.cumsum(lengths) - lengths).astype(np.int32).repeat(lengths)
    return TokenStream(ids, roles, segments, positions)


def seq2seq_sample(
    encoder: TokenStream, targets: Sequence[np.ndarray], start: int, eos: int, separate: bool
) -> Sample:
    """Makes a sample whose decoder generates the target of each document and `eos`."""
    # Shifted right by one: each input is the token before the predicted one.
    decoder = join_documents(
        [[((start,), Role.SPECIAL), (target, Role.LABEL)] for target in targets], separate
    )
    predicted = np.concatenate([np.append(target, eos).astype(np.int32) for target in targets])
    return Sample(encoder, np.arange(len(predicted), dtype=np.int32), predicted, decoder)


def encode_sample(sample: Sample) -> Encoded:
    """Converts a sample to the form that batches take."""
    decoder = None if sample.decoder is None else _row(sample.decoder)
    row = _row(sample.encoder)._asdict()
    return Encoded(**row, label_pos=sample.label_pos, decoder=decoder, targets=sample.targets)


def _row(stream: TokenStream) -> Row:
    # No soft tokens: these samples pre-train or adapt the backbone itself.
    no_slots = np.full(len(stream.ids), -1, np.int32)
    types = np.zeros(len(stream.ids), np.int32)
    return Row(stream.ids, no_slots, types, stream.roles, stream.positions, stream.segments)
