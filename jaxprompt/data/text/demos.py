"""Demonstrations: labelled training examples that are added to the input of an example.

With a masked model, one of each class follows the example (Gao et al. 2021, section 6). For
in-context learning (Brown et al. 2020, section 2), as many as fit, or an exact number, precede it.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.marking import truncated_lengths
from jaxprompt.data.text.token_runs import TokenRun
from jaxprompt.errors import InputError

# Cosine similarities that agree to so many decimals count as equal: the padding of a batch moves
# the last digits of an embedding, and must not change which examples are the most similar.
_DECIMALS = 5


COUNTS = ("per_class", "total", "exact")  # of which a config sets one


class DemoSettings(NamedTuple):
    """Which demonstrations an example gets; the fields are those of the block `demos`."""

    per_class: int
    total: int
    exact: int
    samples: int
    similar: float
    encoder: str
    max_demo_tokens: int
    max_example_tokens: int
    seed: int  # data.seed

    @property
    def field(self) -> str:
        """The field with the number of demonstrations, as "demos.total=4"."""
        name = next(name for name in COUNTS if getattr(self, name))
        return f"demos.{name}={getattr(self, name)}"


# examples -> their cosine similarities to those of the pool, float [examples, pool]
Similarity = Callable[[Sequence[Example]], np.ndarray]


class Demonstrations:
    """Samples demonstrations from training examples.

    The demonstrations of an example depend only on its texts, the training examples and the seed:
    not on its split, nor on what is encoded with it. So an export scores a text as its run did.
    """

    def __init__(
        self,
        settings: DemoSettings,
        pool: Sequence[Example],
        names: Sequence[str],
        similarity: Similarity | None = None,
    ):
        """Takes the training examples and the class names.

        Raises InputError if there are fewer examples than requested, in total or of a class.
        """
        self.settings, self.pool = settings, list(pool)
        self.similarity, self._names = similarity, names
        labels = np.array([example.label for example in self.pool], np.int64)
        self._classes = [np.flatnonzero(labels == label) for label in range(len(names))]
        self._check_counts(self._classes, "")
        self._rows_by_text: dict[str, list[int]] = {}  # rows of the pool
        for row, example in enumerate(self.pool):
            self._rows_by_text.setdefault(_texts(example), []).append(row)

    def summary(self) -> str:
        """Returns a message with the demonstrations that each example gets."""
        settings = self.settings
        count = f"up to {settings.total}"
        if settings.per_class:
            count = f"{settings.per_class} of each class"
        elif settings.exact:
            count = f"exactly {settings.exact}"
        share = f", among the most similar {settings.similar:.3g} of a class"
        return (
            f"demonstrations: {count}, from {len(self.pool)} examples"
            f"{share if settings.similar < 1 else ''}, {settings.samples} samples"
        )

    def single_sample(self) -> "Demonstrations":
        """Returns a copy that takes only the first sample."""
        other = copy.copy(self)
        other.settings = self.settings._replace(samples=1)
        return other

    def sample(self, examples: Sequence[Example]) -> list[list[tuple[Example, ...]]]:
        """Samples the demonstrations of each example, [examples][samples].

        Training examples with the same texts as the example are excluded. Raises InputError if too
        few remain, in total or of a class.
        """
        if self.similarity is None:
            return [self._sample_one(example, None) for example in examples]
        similarities = np.round(self.similarity(examples), _DECIMALS)
        return [self._sample_one(*pair) for pair in zip(examples, similarities, strict=True)]

    def _sample_one(
        self, example: Example, similarity: np.ndarray | None
    ) -> list[tuple[Example, ...]]:
        texts = _texts(example)
        candidates = []
        for rows in self._classes:
            # By texts, not by number: a training set may contain an example twice.
            rows = rows[~np.isin(rows, self._rows_by_text.get(texts, []))]
            if similarity is not None:
                # The share may round down to fewer than are needed.
                count = max(self.settings.per_class, 1, int(self.settings.similar * len(rows)))
                rows = rows[np.argsort(-similarity[rows], kind="stable")[:count]]
            candidates.append(rows)
        which = ", of the most similar" if similarity is not None else ""
        self._check_counts(candidates, f" other than the example itself{which}")
        # RandomState's streams are frozen by numpy's policy, Generator's are not.
        rng = np.random.RandomState(_rng_seed(self.settings.seed, texts))
        samples = []
        for _ in range(self.settings.samples):
            if self.settings.per_class:
                count = self.settings.per_class
                rows = np.concatenate([rng.permutation(rows)[:count] for rows in candidates])
            else:
                count = self.settings.exact or self.settings.total
                rows = rng.permutation(np.concatenate(candidates))[:count]
            samples.append(tuple(self.pool[row] for row in rows))
        return samples

    def _check_counts(self, candidates: Sequence[np.ndarray], which: str) -> None:
        """Raises InputError if there are too few candidates of a class or in total."""
        counts = list(map(len, candidates))
        subject, count = "there are", sum(counts)
        if self.settings.per_class:
            count = min(counts)
            subject = f"class {self._names[counts.index(count)]!r} has"
        if count < (self.settings.per_class or self.settings.exact):
            raise InputError(
                f"{self.settings.field}, but {subject} {count} training examples{which}; lower it "
                "to that, or add examples"
            )


def _texts(example: Example) -> str:
    """Returns the texts of an example as one string, equal for equal texts."""
    return json.dumps([example.fields, example.choices], sort_keys=True)


def _rng_seed(seed: int, texts: str) -> np.ndarray:
    """Returns the seed of RandomState for a data seed and the texts of an example."""
    digest = hashlib.sha256(f"{seed} {texts}".encode()).digest()
    # Little-endian by name: the same seeds on every machine.
    return np.frombuffer(digest, "<u4")


# -- layout ---------------------------------------------------------------------------------------


class DemoLayout(NamedTuple):
    """How demonstrations are laid out with an example."""

    words: Sequence[Sequence[int]]  # token ids of the label word of each class
    separator: tuple[TokenRun, ...]  # between two examples
    demos_first: bool  # before the example, else after it
    drop_unfit: bool  # demonstrations that do not fit are left out, else the texts of all are cut
    never_cut: bool  # no text is cut; one that does not fit is an error
    max_demo_tokens: int = 0  # of each text of a demonstration; 0 = as many as fit
    max_example_tokens: int = 0  # of each text of the example


def lay_out_demos(
    example: list[TokenRun],
    demos: Sequence[list[TokenRun]],
    layout: DemoLayout,
    num_leading: int,
    room: int,
    where: str,
) -> tuple[list[TokenRun], bool]:
    """Lays out demonstrations with an example and truncates texts until all fit into `room` tokens.

    Args:
      example: the runs of the example; the last one is the end of the input.
      demos: the runs of each demonstration. Their texts are truncated before those of the example;
        each text keeps at least one token, or all if `layout.never_cut`.
      layout: the layout.
      num_leading: number of runs of the example that come before all others.
      room: maximum number of tokens.
      where: name of the template, for messages.

    Returns:
      The runs, none of which is still to be truncated, and whether a text was truncated.

    Raises:
      InputError: if the tokens that must stay do not fit.
    """
    example = _limit(example, layout.max_example_tokens)
    demos = [_limit(demo, layout.max_demo_tokens) for demo in demos]
    separator = [run._replace(segment=example[-1].segment) for run in layout.separator]
    separator_length = _length(separator)
    if layout.drop_unfit:
        sizes = np.cumsum([_length(demo) + separator_length for demo in demos])
        fitting = int(np.searchsorted(sizes, room - _length(example), side="right"))
        demos = demos[: max(1, fitting)]
    demo_runs = list(chain.from_iterable(demos))
    example_lengths = [len(run.ids) for run in example if run.cut]
    demo_lengths = [len(run.ids) for run in demo_runs if run.cut]
    fixed = _length([run for run in [*example, *demo_runs] if not run.cut])
    fixed += separator_length * len(demos)
    min_demo_tokens = sum(length > 0 for length in demo_lengths)
    needed = fixed + min_demo_tokens + sum(length > 0 for length in example_lengths)
    if layout.never_cut:
        needed = fixed + sum(example_lengths) + sum(demo_lengths)
    if needed > room:
        raise InputError(
            f"{where} with {len(demos)} demonstrations takes {needed} tokens, but data.max_len "
            f"leaves {room}; raise data.max_len by {needed - room} or more, use fewer "
            "demonstrations, or truncate texts by demos.max_demo_tokens and "
            "demos.max_example_tokens"
        )
    # The texts of the example have priority; each text of a demonstration keeps one token.
    example_limits = truncated_lengths(example_lengths, room - fixed - min_demo_tokens)
    demo_limits = truncated_lengths(demo_lengths, room - fixed - sum(example_limits))
    example = _shorten(example, example_limits)
    lengths = iter(demo_limits)
    demos = [_shorten(demo, [next(lengths) for run in demo if run.cut]) for demo in demos]
    leading, middle, end = example[:num_leading], example[num_leading:-1], example[-1:]
    parts = [*demos, middle] if layout.demos_first else [middle, *demos]
    body = list(parts[0])
    for _, part in pairwise(parts):
        body += [*separator, *part]
    is_cut = sum(example_limits) + sum(demo_limits) < sum(example_lengths) + sum(demo_lengths)
    return [*leading, *body, *end], is_cut


def _length(runs: Sequence[TokenRun]) -> int:
    return sum(len(run.ids) for run in runs)


def _limit(runs: Sequence[TokenRun], limit: int) -> list[TokenRun]:
    """Truncates each text to so many tokens; 0 = no limit."""
    return [run._replace(ids=run.ids[:limit]) if limit and run.cut else run for run in runs]


def _shorten(runs: Sequence[TokenRun], lengths: Sequence[int]) -> list[TokenRun]:
    """Truncates the texts of runs to these lengths, in order."""
    limits = iter(lengths)
    return [
        run._replace(ids=run.ids[: next(limits)], cut=False) if run.cut else run for run in runs
    ]
