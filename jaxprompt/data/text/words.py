"""Which vocabulary rows a soft prompt starts from.

Each function returns P lists of token ids: row i starts at the mean of the embeddings of list i.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts
from jaxprompt.errors import InputError, nearest
from jaxprompt.types import Role

Ids = list[list[int]]
KINDS = ("vocab", "frequent", "labels", "text", "task")
FROM_TEXT = ("frequent", "task")  # those that need a text
TOP = 1000  # tokens that "frequent" draws from, unless told

# As BERT, Gemma, fairseq and T5 write them.
_UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>|madeupword\d+|<extra_id_\d+>")


def ids_of_no_word(tokenizer: Tokenizer) -> set[int]:
    """Ids that are no words: specials, and rows that pre-training never used."""
    unused = {i for token, i in tokenizer.get_vocab().items() if _UNUSED.fullmatch(token)}
    return unused | set(tokenizer.all_special_ids)


def text_ids(rows: Iterable[Sequence[Encoded]]) -> np.ndarray:
    """Token ids of the texts of encoded examples, one after the other. int32 [tokens]"""
    parts = [row.ids[row.roles == Role.TEXT] for example in rows for row in example]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def sampled_vocab(
    rng: np.random.RandomState,
    vocab_size: int,
    length: int,
    specials: Iterable[int],
    first: int = 0,
) -> Ids:
    """Draws from the vocabulary, or from its `first` ids.

    A vocabulary is sorted by frequency; Lester et al. (2021) take the 5,000 most common, PPT (Gu et
    al. 2022, table 2) the whole.
    """
    # Sorted, so that a seed draws the same whatever the order of the vocabulary.
    known = np.setdiff1d(np.arange(min(first or vocab_size, vocab_size)), list(specials))
    return _draw(rng, known, length, "the vocabulary")


def frequent_words(
    rng: np.random.RandomState,
    counts: np.ndarray,
    length: int,
    specials: Iterable[int],
    top: int = TOP,
) -> Ids:
    """Draws from the `top` most frequent tokens of a corpus (Gu et al. 2022, PPT, table 2).

    `counts` [ids] says how often each stands there.
    """
    known = np.setdiff1d(np.flatnonzero(counts), list(specials))
    ranked = known[np.argsort(-counts[known], kind="stable")]  # equal counts by their ids
    return _draw(rng, ranked[:top], length, "the corpus")


def task_words(
    rng: np.random.RandomState, counts: np.ndarray, length: int, specials: Iterable[int]
) -> Ids:
    """Draws from all distinct tokens of the training text, frequent or not. counts: [ids]"""
    known = np.setdiff1d(np.flatnonzero(counts), list(specials))
    return _draw(rng, known, length, "the training text")


def class_labels(
    labels: Sequence[Sequence[int]], length: int, fallback: Callable[[int], Ids]
) -> Ids:
    """Gives row i all token ids of class i's words (Lester et al. 2021), the rest by fallback.

    `fallback(n)` returns n lists. Classes beyond `length` are left out, with a warning.
    """
    if len(labels) > length:
        logging.getLogger(__name__).warning(
            "%d classes, but %d soft tokens: the last %d classes start no row",
            len(labels),
            length,
            len(labels) - length,
        )
    found = [list(ids) for ids in labels[:length]]
    return found + fallback(length - len(found))


def given_text(tokenizer: Tokenizer, text: str, length: int, fallback: Callable[[int], Ids]) -> Ids:
    """Gives row i token i of a text, cut to `length`; the rest by fallback, as in class_labels."""
    ids = starting_ids(tokenizer, text.strip())
    if not ids:
        raise InputError(f"prompt text {text!r} has no token; give some words")
    return [[i] for i in ids[:length]] + fallback(max(length - len(ids), 0))


def starting_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that rows start from. Raises InputError for words that are unknown."""
    (ids,) = encode_texts(tokenizer, [text])
    if tokenizer.unk_token_id in ids:
        raise InputError(
            f"prompt.text={text.strip()!r} has words that are not in the vocabulary of "
            f"{tokenizer.name_or_path!r}; choose others"
        )
    return ids


def template_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes the words of a template as they stand inside of it.

    A space stands in front of a word and none in front of punctuation, even where `text` sets it
    apart, as in LM-BFF's templates, "sentence?<mask>, sentence": a byte-level vocabulary has "?"
    and " ?" as two tokens.
    """
    parts = re.split(r"\s+(?=[?!.,:;])", f" {text.strip()}")
    return [i for part in parts if part for i in starting_ids(tokenizer, part)]


def choose_rows(
    kind: str,
    tokenizer: Tokenizer,
    *,
    length: int,
    seed: int,
    vocab_size: int | None = None,
    counts: np.ndarray | None = None,
    labels: Sequence[Sequence[int]] = (),
    text: str = "",
    top: int = 0,
) -> Ids:
    """Chooses the rows by the name of an initialiser (KINDS); the same seed gives the same rows.

    `counts` says how often each id stands in a text: for "frequent" in a corpus, for "task" in the
    training examples. `labels` are token ids of each class's words; `text` is for "text". Rows
    left over start from the vocabulary: from all of it, or with `top` from its first ids.
    "frequent" draws from the `top` most frequent, of 0 from TOP.
    """
    if kind not in KINDS:
        raise InputError(f"unknown prompt words {kind!r}; {nearest(kind, KINDS)}")
    # Its streams are frozen by numpy's policy: a seed starts from the same rows for good.
    rng = np.random.RandomState(seed)
    specials = ids_of_no_word(tokenizer)
    size = min(vocab_size or len(tokenizer), len(tokenizer))  # an embedding is padded beyond

    def from_vocab(count: int) -> Ids:
        return sampled_vocab(rng, size, count, specials, top)

    if kind == "vocab":
        return from_vocab(length)
    if kind == "labels":
        if not labels:
            raise InputError("prompt words 'labels' need label words; give them or take 'vocab'")
        return class_labels(labels, length, from_vocab)
    if kind == "text":
        return given_text(tokenizer, text, length, from_vocab)
    if counts is None:
        raise InputError(f"prompt words {kind!r} need a text; give one or take 'vocab'")
    if kind == "task":
        return task_words(rng, counts, length, specials)
    return frequent_words(rng, counts, length, specials, top or TOP)


def _draw(rng: np.random.RandomState, known: np.ndarray, length: int, source: str) -> Ids:
    """Draws without replacement, with it where `known` is too short."""
    if not len(known):
        raise InputError(f"{source} has no word to start a soft token from; use other words")
    drawn = rng.choice(known, length, replace=length > len(known))
    return [[int(i)] for i in drawn]
