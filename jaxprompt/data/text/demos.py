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
from jaxprompt.data.text.marking import kept_lengths
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
    def shown(self) -> str:
        """The field with the number of demonstrations, as "demos.total=4"."""
        field = next(name for name in COUNTS if getattr(self, name))
        return f"demos.{field}={getattr(self, field)}"


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
        for label, rows in enumerate(self._classes):
            self._enough(label, len(rows), "")
        self._enough_of_all(len(self.pool), "")
        self._same: dict[str, list[int]] = {}  # rows of the pool by their texts
        for row, example in enumerate(self.pool):
            self._same.setdefault(_texts(example), []).append(row)

    def tell(self) -> str:
        """Returns a message with the demonstrations that each example gets."""
        own, size = self.settings, len(self.pool)
        which = f"{own.per_class} of each class" if own.per_class else f"up to {own.total}"
        which = f"exactly {own.exact}" if own.exact else which
        among = f", among the most similar {own.similar:.3g} of a class" * (own.similar < 1)
        return f"demonstrations: {which}, from {size} examples{among}, {own.samples} samples"

    def once(self) -> "Demonstrations":
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
        found = np.round(self.similarity(examples), _DECIMALS)
        return [self._sample_one(*pair) for pair in zip(examples, found, strict=True)]

    def _sample_one(
        self, example: Example, similarity: np.ndarray | None
    ) -> list[tuple[Example, ...]]:
        own = _texts(example)
        candidates = []
        for label, rows in enumerate(self._classes):
            # By texts, not by number: a training set may hold an example twice, with its label.
            rows = rows[~np.isin(rows, self._same.get(own, []))]
            self._enough(label, len(rows), " other than the example itself")
            if similarity is not None:
                # Rounded to nothing, the share would leave fewer than are asked for.
                count = max(self.settings.per_class, 1, int(self.settings.similar * len(rows)))
                rows = rows[np.argsort(-similarity[rows], kind="stable")[:count]]
            candidates.append(rows)
        others = " other than the example itself"
        others += ", of the most similar" * (similarity is not None)
        self._enough_of_all(sum(map(len, candidates)), others)
        # RandomState's streams are frozen by numpy's policy, Generator's are not.
        rng = np.random.RandomState(_seeds(self.settings.seed, own))
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

    def _enough(self, label: int, count: int, which: str) -> None:
        if count < self.settings.per_class:
            raise InputError(
                f"demos.per_class={self.settings.per_class}, but class {self._names[label]!r} has "
                f"{count} training examples{which}; set demos.per_class to {count} or less, or add "
                "examples"
            )

    def _enough_of_all(self, count: int, which: str) -> None:
        if count < self.settings.exact:
            raise InputError(
                f"demos.exact={self.settings.exact}, but there are {count} training examples"
                f"{which}; set demos.exact to {count} or less, or add examples"
            )


def _texts(example: Example) -> str:
    """Writes the texts of an example as one string: equal for equal texts."""
    return json.dumps([example.fields, example.choices], sort_keys=True)


def _seeds(seed: int, texts: str) -> np.ndarray:
    """Turns a seed and the texts of an example into what RandomState is seeded with."""
    digest = hashlib.sha256(f"{seed} {texts}".encode()).digest()
    # Little-endian by name: the same seeds on every machine.
    return np.frombuffer(digest, "<u4")


# -- layout ---------------------------------------------------------------------------------------


class Beside(NamedTuple):
    """How demonstrations are laid out with an example."""

    words: Sequence[Sequence[int]]  # token ids of the label word of each class
    separator: tuple[TokenRun, ...]  # between an example and the next
    first: bool  # in front of the example
    drops: bool  # those that do not fit whole are left out; else the texts of all are cut
    whole: bool  # no text is cut: where one does not fit, that is an error
    max_demo_tokens: int = 0  # of each of their texts; 0 = what fits
    max_example_tokens: int = 0  # of each of the example's own


def lay(
    own: list[TokenRun],
    demos: Sequence[list[TokenRun]],
    how: Beside,
    front: int,
    room: int,
    where: str,
) -> tuple[list[TokenRun], bool]:
    """Lays out demonstrations with an example and truncates texts until all fit into `room` tokens.

    Args:
      own: the runs of the example. The first `front` of them come first; the last one, the end,
        comes
        last.
      demos: the runs of each demonstration. Their texts are truncated before those of the example;
        each text keeps at least one token, or all if `how.whole`.
      how: the layout.
      front: number of runs of the example that come first.
      room: maximum number of tokens.
      where: name of the template, for messages.

    Returns:
      The runs, none of which is still to be truncated, and whether a text was truncated.

    Raises:
      InputError: if the tokens that must stay do not fit.
    """
    own = _limit(own, how.max_example_tokens)
    demos = [_limit(demo, how.max_demo_tokens) for demo in demos]
    separator = [run._replace(segment=own[-1].segment) for run in how.separator]
    between = _length(separator)
    if how.drops:
        sizes = np.cumsum([_length(demo) + between for demo in demos])
        fitting = int(np.searchsorted(sizes, room - _length(own), side="right"))
        demos = demos[: max(1, fitting)]
    shown = list(chain.from_iterable(demos))
    ours = [len(run.ids) for run in own if run.cut]
    theirs = [len(run.ids) for run in shown if run.cut]
    fixed = _length(own) + _length(shown) - sum(ours) - sum(theirs) + between * len(demos)
    least = sum(length > 0 for length in theirs)
    needed = fixed + least + sum(length > 0 for length in ours)
    if how.whole:
        needed = fixed + sum(ours) + sum(theirs)
    if needed > room:
        held = "in full" if how.whole else "with one token of each text"
        cure = "use fewer demonstrations"
        cure += (
            ", or truncate texts by demos.max_demo_tokens and demos.max_example_tokens" * how.whole
        )
        raise InputError(
            f"{where} with {len(demos)} demonstrations takes {needed} tokens {held}, over the "
            f"{room} that data.max_len leaves; raise data.max_len by {needed - room} or more, or "
            f"{cure}"
        )
    # The example's own texts come first, with a token kept back for each text of a demonstration.
    kept = kept_lengths(ours, room - fixed - least)
    kept_theirs = kept_lengths(theirs, room - fixed - sum(kept))
    own = _shorten(own, kept)
    lengths = iter(kept_theirs)
    demos = [_shorten(demo, [next(lengths) for run in demo if run.cut]) for demo in demos]
    begin, middle, end = own[:front], own[front:-1], own[-1:]
    parts = [*demos, middle] if how.first else [middle, *demos]
    body = list(parts[0])
    for _, part in pairwise(parts):
        body += [*separator, *part]
    cut = sum(kept) + sum(kept_theirs) < sum(ours) + sum(theirs)
    return [*begin, *body, *end], cut


def _length(runs: Sequence[TokenRun]) -> int:
    return sum(len(run.ids) for run in runs)


def _limit(runs: Sequence[TokenRun], limit: int) -> list[TokenRun]:
    """Truncates each text to so many tokens; 0 = no limit."""
    return [run._replace(ids=run.ids[:limit]) if limit and run.cut else run for run in runs]


def _shorten(runs: Sequence[TokenRun], lengths: Sequence[int]) -> list[TokenRun]:
    """Truncates the texts of runs to these lengths, in order."""
    left = iter(lengths)
    return [run._replace(ids=run.ids[: next(left)], cut=False) if run.cut else run for run in runs]
