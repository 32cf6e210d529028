"""What an autoregressive model has to generate, and the position at which each token is scored.

All label words are scored in one pass. They share a stem; after it, each word of several tokens is
a branch, whose tokens see the stem and each other but no other branch, and whose positions continue
from the end of the stem.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxprompt.data.text.encoded import Ints, Row, make_row
from jaxprompt.data.text.specials import Specials
from jaxprompt.data.text.template import Template, parse
from jaxprompt.errors import InputError
from jaxprompt.types import Role

# By class and word: each token, and the read position that predicts it.
_ScoredTokens = dict[tuple[int, int], list[tuple[int, int]]]


class Frame(NamedTuple):
    """The tokens around a label word in the decoder's output."""

    stem: tuple[int, ...]  # before the word
    end: tuple[int, ...]  # after the word


class Branches(NamedTuple):
    """How label words are fed to the decoder and scored, the same for every example."""

    fed: np.ndarray  # int32 [T], input tokens of all branches
    branch: np.ndarray  # int32 [T], the branch of each, from 1
    depth: np.ndarray  # int32 [T], their positions after the end of the stem, from 1
    reads: np.ndarray  # int32 [M], read positions: 0 the stem's end, < 0 before it, i at fed[i - 1]
    words: "WordTokens"  # the label words alone
    whole: "WordTokens"  # with stem and end


class WordTokens(NamedTuple):
    """The tokens that make up each class word. int32 [C, W, J], -1 = none."""

    ids: np.ndarray  # vocabulary ids
    at: np.ndarray  # which of the M read positions predicts each

    @property
    def rows(self) -> np.ndarray:
        """Vocabulary ids in use, ascending. int32 [R]"""
        return np.unique(self.ids[self.ids >= 0]).astype(np.int32)

    @property
    def where(self) -> np.ndarray:
        """Index of each token in `rows`, -1 = none. int32 [C, W, J]"""
        return np.where(self.ids >= 0, np.searchsorted(self.rows, self.ids), -1).astype(np.int32)


def read_answer(text: str) -> tuple[Template, int]:
    """Reads the layout of an answer, "[mask] {label} [mask]", and its number of sentinels."""
    answer = parse(text)
    kinds = [part.kind for part in answer.parts]
    fields = [part.text for part in answer.parts if part.kind == "field"]
    if fields != ["label"] or set(kinds) - {"mask", "field", "sep"}:
        raise InputError(
            f"task.answer={text!r} must contain {{label}} once, with only [mask] and [sep] around "
            f"it; e.g. '[mask] {{label}}' or '{{label}} [sep]'"
        )
    return answer, kinds.count("mask")


def default_answer(style: str, form: str = "cloze") -> str:
    """Returns the default layout: a label word alone in text, or after the sentinel of a T5."""
    if form == "text":
        return "{label} [sep]"
    return "{label}" if style == "infilling" else "[mask] {label}"


def make_answer_frame(answer: Template, specials: Specials) -> Frame:
    """Converts the layout of an answer to tokens; each [mask] is the next sentinel.

    Raises InputError for a [mask] in the answer of a GLM, which has no sentinels.
    """
    if specials.style == "infilling" and any(part.kind == "mask" for part in answer.parts):
        raise InputError(
            f"task.answer={answer.source!r} has [mask], but a GLM has no sentinels: its only blank "
            f"is in the template; use '{{label}}'"
        )
    sentinels = iter(specials.masks)
    stem: list[int] = []
    end: list[int] = []
    tokens = stem
    for part in answer.parts:
        if part.kind == "field":
            tokens = end
        else:
            tokens += [next(sentinels) if part.kind == "mask" else specials.stop]
    return Frame(tuple(stem), tuple(end))


def masked_plan(words: np.ndarray) -> Branches:
    """Plans for masks: token j of a word is predicted at mask j. words: int32 [C, W, M]"""
    none = np.zeros(0, np.int32)
    order = np.arange(words.shape[2], dtype=np.int32)
    tokens = WordTokens(words, np.where(words >= 0, order, -1).astype(np.int32))
    return Branches(none, none, none, order, tokens, tokens)


def branch_plan(words: np.ndarray, frame: Frame, *, whole: bool) -> Branches:
    """Plans for a decoder. words: int32 [C, W, J]

    With `whole` the stem and the end are scored too, so that the loss can cover the whole target.
    """
    fed: list[int] = []
    branch: list[int] = []
    depth: list[int] = []
    stem = [(token, i - len(frame.stem)) for i, token in enumerate(frame.stem)]
    inner: _ScoredTokens = {}
    outer: _ScoredTokens = {}
    number = 0
    for c, w in np.ndindex(words.shape[:2]):
        word = [int(token) for token in words[c, w] if token >= 0]
        if not word:
            continue
        fed_word = word + list(frame.end if whole else ())
        # The first token is read at the stem's end, each other one at the token before it.
        read_at = [0] + [len(fed) + i for i in range(1, len(fed_word))]
        if len(fed_word) > 1:
            number += 1
            # The last token is predicted, never fed.
            fed += fed_word[:-1]
            branch += [number] * (len(fed_word) - 1)
            depth += range(1, len(fed_word))
        scored = list(zip(fed_word, read_at, strict=True))
        # The stem is the same for all branches, and read at the positions before its end.
        inner[c, w], outer[c, w] = scored[: len(word)], stem + scored
    reads = sorted(
        {place for scored in (outer if whole else inner).values() for _, place in scored}
    )
    return Branches(
        np.array(fed, np.int32),
        np.array(branch, np.int32),
        np.array(depth, np.int32),
        np.array(reads, np.int32),
        words=_tabulate(inner, words.shape[:2], reads),
        whole=_tabulate(outer if whole else inner, words.shape[:2], reads),
    )


def append_answer(
    row: Row, plan: Branches | None, target: list[int] | None
) -> tuple[Row, np.ndarray, np.ndarray | None]:
    """Appends label words or free text to a row: Row, label_pos [M], targets [M] or None."""
    last = len(row.ids) - 1
    fed: Ints = ()
    branch: Ints = ()
    depth: Ints = ()
    targets, reads = None, np.zeros(1, np.int32)
    if target is not None:
        # Shifted by one: the row's last token predicts the first of the target.
        fed, targets = target[:-1], np.array(target, np.int32)
        reads = np.arange(len(target), dtype=np.int32)
        branch, depth = [0] * len(fed), reads[1:]
    elif plan is not None:
        fed, branch, depth, reads = plan.fed, plan.branch, plan.depth, plan.reads
    if len(depth):
        count = len(depth)
        # All branches start at the same position, as if each were the only one.
        positions = row.positions[-1] + depth
        appended = make_row(fed, [-1] * count, branch, [Role.LABEL] * count, positions)
        pairs = zip(row[:-1], appended[:-1], strict=True)  # all but the segments, which are None
        row = Row(*map(np.concatenate, pairs))
    return row, (last + reads).astype(np.int32), targets


def _tabulate(pairs: _ScoredTokens, shape: tuple[int, int], reads: Sequence[int]) -> WordTokens:
    longest = max(map(len, pairs.values()))
    ids, at = (np.full((*shape, longest), -1, np.int32) for _ in range(2))
    for (c, w), word in pairs.items():
        ids[c, w, : len(word)] = [token for token, _ in word]
        at[c, w, : len(word)] = [reads.index(pos) for _, pos in word]
    return WordTokens(ids, at)
