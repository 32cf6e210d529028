"""Batches of an objective's samples from an indexed corpus, each from its number alone."""

import abc
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from jaxprompt.corpus import Corpus, Shuffle
from jaxprompt.corpus.denoise.pack import pack_documents, slice_document
from jaxprompt.corpus.denoise.samples import (
    DenoisingObjective,
    encode_sample,
    process_slice,
    sample_rng,
)
from jaxprompt.data.batches.batching import collate
from jaxprompt.data.batches.stream import ENDLESS, BatchStream
from jaxprompt.data.text.encoded import Encoded, Ints
from jaxprompt.types import Batch


class SampleSource(abc.ABC):
    """Samples by number; each visit to a sample draws it again."""

    _widths: dict[str, Any]  # of the arrays, and other arguments of `collate`

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abc.abstractmethod
    def _make(self, index: int, visit: int, seed: int) -> tuple[Encoded, int]:
        """Makes a sample and its label (0 = none), sampled by (seed, visit)."""

    def batch(
        self,
        indices: Sequence[int],
        visits: Sequence[int],
        seed: int,
        *,
        size: int,
        share: tuple[int, int] = (0, 1),
    ) -> Batch:
        """Builds a batch of `size` samples, or the part `share` (index, number of parts) of it.

        Each sample is drawn by (seed, its visit). Missing samples are padding of weight 0.
        """
        part, pairs = process_slice(size, share), list(zip(indices, visits, strict=True))
        samples = [self._make(*pair, seed) for pair in pairs[part]]
        # A process without a sample needs arrays of the same form as the others.
        like, _ = samples[0] if samples else self._make(*pairs[0], seed)
        return collate(
            [[sample] for sample, _ in samples],
            np.array([label for _, label in samples], np.int32),
            indices[part],
            # The same size in every process, even if the last batch has no sample for one of them.
            batch=part.stop - part.start,
            like=like,
            **self._widths,
        )


class DenoisingSamples(SampleSource):
    """Samples that documents are divided into once; each visit masks a sample at random."""

    def __init__(
        self,
        corpus: Corpus,
        documents: Ints,
        objective: DenoisingObjective,
        *,
        packed: bool,
        pad_id: int,
    ):
        """Packs `documents`, in order. Raises InputError if there are none."""
        self._corpus, self._objective = corpus, objective
        self._documents = np.asarray(documents, np.int64)
        # By lengths alone: packing never reads the tokens themselves.
        lengths = corpus.lengths()[self._documents] + len(objective.end_ids)
        self._packing = pack_documents(lengths, objective.capacity, packed=packed)
        self._widths = dict(
            length=objective.lengths[0],
            decoder_length=sum(objective.lengths[1:]),
            label_width=objective.max_targets,
            pad_id=pad_id,
        )

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self._packing)

    def _make(self, index: int, visit: int, seed: int) -> tuple[Encoded, int]:
        end_ids = self._objective.end_ids
        chunks = [
            slice_document(self._corpus.tokens(int(self._documents[i])), start, stop, end_ids)
            for i, start, stop in self._packing.chunks(index)
        ]
        return encode_sample(self._objective(chunks, sample_rng(seed, visit))), 0


class ShuffledBatches(BatchStream):
    """Endless batches: each epoch visits every sample once, in a new order.

    Prefetched by grain's threads. Everything depends only on (seed, number of the batch).
    """

    def __init__(
        self,
        samples: SampleSource,
        *,
        batch: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
        prefetch: int = 4,
    ):
        """Starts at batch 0; `prefetch` batches are made ahead, 0 = in the caller's thread."""
        self._samples, self._batch, self._seed, self._share = samples, batch, seed, share
        # Two, because prefetched batches may be of two epochs.
        self._order = lru_cache(maxsize=2)(lambda epoch: Shuffle(len(samples), seed, epoch))
        self.steps_per_epoch = -(-len(samples) // batch)
        settings = {"rows": len(samples), "batch": batch, "seed": seed}
        super().__init__(self._batch_at, ENDLESS, prefetch, settings, "corpus and")

    def _batch_at(self, step: int) -> Batch:
        epoch, number = divmod(step, self.steps_per_epoch)
        size = len(self._samples)
        places = range(number * self._batch, min((number + 1) * self._batch, size))
        order = self._order(epoch)
        return self._samples.batch(
            [order[place] for place in places],
            # Numbered across all epochs, so that each epoch masks other tokens of a sample.
            [epoch * size + place for place in places],
            self._seed,
            size=self._batch,
            share=self._share,
        )


class EvalBatches:
    """One pass over the first samples, with the same random choices in every pass."""

    def __init__(
        self,
        samples: SampleSource,
        *,
        batch: int,
        seed: int,
        limit: int,
        share: tuple[int, int] = (0, 1),
    ):
        """Takes at most `limit` samples."""
        self._samples, self._batch, self._seed, self._share = samples, batch, seed, share
        self.size = min(limit, len(samples))

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches; `Batch.index` is the number of each sample."""
        for first in range(0, self.size, self._batch):
            indices = list(range(first, min(first + self._batch, self.size)))
            # The index is also the visit: every pass masks the same tokens, so that the losses of
            # different steps are comparable.
            yield self._samples.batch(
                indices, indices, self._seed, size=self._batch, share=self._share
            )
