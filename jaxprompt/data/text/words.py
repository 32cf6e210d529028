"""The vocabulary rows that a soft prompt is initialised from.

Each function returns P lists of token ids: row i is initialised with the mean embedding of list i.
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
FROM_TEXT = ("frequent", "task")  # kinds that count the tokens of a text
TOP = 1000  # by default "frequent" samples from as many tokens

# As BERT, Gemma, fairseq and T5 write them.
_UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>|madeupword\d+|<extra_id_\d+>")


def ids_of_no_word(tokenizer: Tokenizer) -> set[int]:
    """Returns ids that are not words: special tokens, and rows that pre-training never used."""
    unused = {i for token, i in tokenizer.get_vocab().items() if _UNUSED.fullmatch(token)}
    return unused | set(tokenizer.all_special_ids)


def text_ids(rows: Iterable[Sequence[Encoded]]) -> np.ndarray:
    """Returns the token ids of the texts of encoded examples, concatenated. int32 [tokens]"""
    parts = [row.ids[row.roles == Role.TEXT] for example in rows for row in example]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def sampled_vocab(
    rng: np.random.RandomState,
    vocab_size: int,
    length: int,
    specials: Iterable[int],
    first: int = 0,
) -> Ids:
    """Samples from the vocabulary, or from its `first` ids.

    A vocabulary is sorted by frequency; Lester et al. (2021) use the 5,000 most common, PPT (Gu et
    al. 2022, table 2) all of it.
    """
    # Sorted, so that the samples do not depend on the order of the vocabulary.
    candidates = np.setdiff1d(np.arange(min(first or vocab_size, vocab_size)), list(specials))
    return _sample(rng, candidates, length, "the vocabulary")


def frequent_words(
    rng: np.random.RandomState,
    counts: np.ndarray,
    length: int,
    specials: Iterable[int],
    top: int = TOP,
) -> Ids:
    """Samples from the `top` most frequent tokens of a corpus (Gu et al. 2022, PPT, table 2).

    `counts` [ids] is the number of occurrences of each.
    """
    candidates = np.setdiff1d(np.flatnonzero(counts), list(specials))
    ranked = candidates[np.argsort(-counts[candidates], kind="stable")]  # equal counts by their ids
    return _sample(rng, ranked[:top], length, "the corpus")


def task_words(
    rng: np.random.RandomState, counts: np.ndarray, length: int, specials: Iterable[int]
) -> Ids:
    """Samples from all distinct tokens of the training text, however rare. counts: [ids]"""
    candidates = np.setdiff1d(np.flatnonzero(counts), list(specials))
    return _sample(rng, candidates, length, "the training text")


def label_rows(labels: Sequence[Sequence[int]], length: int, fallback: Callable[[int], Ids]) -> Ids:
    """Returns for row i all token ids of class i's words (Lester et al. 2021), then the fallback.

    `fallback(n)` returns n lists. Classes beyond `length` are dropped, with a warning.
    """
    if len(labels) > length:
        logging.getLogger(__name__).warning(
            "%d classes, but only %d soft tokens: the last %d classes are not used",
            len(labels),
            length,
            len(labels) - length,
        )
    rows = [list(ids) for ids in labels[:length]]
    return rows + fallback(length - len(rows))


def text_rows(tokenizer: Tokenizer, text: str, length: int, fallback: Callable[[int], Ids]) -> Ids:
    """Returns for row i token i of a text, up to `length`, then the fallback as in label_rows."""
    ids = starting_ids(tokenizer, text.strip())
    if not ids:
        raise InputError(f"prompt text {text!r} has no tokens; use other words")
    return [[i] for i in ids[:length]] + fallback(max(length - len(ids), 0))


def starting_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that rows are initialised from. Raises InputError for unknown words."""
    (ids,) = encode_texts(tokenizer, [text])
    if tokenizer.unk_token_id in ids:
        raise InputError(
            f"prompt.text={text.strip()!r} has words that are not in the vocabulary of "
            f"{tokenizer.name_or_path!r}; choose others"
        )
    return ids


def template_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes the words of a template as inside of it.

    Words follow a space and punctuation does not, even if `text` has a space before it, as LM-BFF's
    templates do, "sentence?<mask>, sentence": a byte-level vocabulary has "?" and " ?" as two
    tokens.
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
    """Chooses rows by the name of an initialiser (KINDS); the same seed gives the same rows.

    Args:
      kind: name of the initialiser.
      tokenizer: the tokenizer.
      length: number of rows.
      seed: seed of the sampling.
      vocab_size: number of rows of the embedding; by default the size of the tokenizer.
      counts: number of occurrences of each id: for "frequent" in a corpus, for "task" in the
        training examples.
      labels: token ids of each class's words, for "labels". The remaining rows are initialised from
        the vocabulary: from all of it, or with `top` from its first ids.
      text: the text for "text"; the remaining rows as for "labels".
      top: for "frequent", how many of the most frequent tokens to sample from; 0 = TOP.
    """
    if kind not in KINDS:
        raise InputError(f"unknown prompt words {kind!r}; {nearest(kind, KINDS)}")
    # RandomState's streams are frozen by numpy's policy, so a seed always gives the same rows.
    rng = np.random.RandomState(seed)
    specials = ids_of_no_word(tokenizer)
    size = min(vocab_size or len(tokenizer), len(tokenizer))  # the embedding may be padded

    def from_vocab(count: int) -> Ids:
        return sampled_vocab(rng, size, count, specials, top)

    if kind == "vocab":
        return from_vocab(length)
    if kind == "labels":
        if not labels:
            raise InputError("prompt words 'labels' need label words; set them, or use 'vocab'")
        return label_rows(labels, length, from_vocab)
    if kind == "text":
        return text_rows(tokenizer, text, length, from_vocab)
    if counts is None:
        raise InputError(f"prompt words {kind!r} need a text; set one, or use 'vocab'")
    if kind == "task":
        return task_words(rng, counts, length, specials)
    return frequent_words(rng, counts, length, specials, top or TOP)


def _sample(rng: np.random.RandomState, candidates: np.ndarray, length: int, source: str) -> Ids:
    """Samples without replacement, or with it if `candidates` is too short."""
    if not len(candidates):
        raise InputError(f"{source} has no words to initialise a soft token from; use other words")
    ids = rng.choice(candidates, length, replace=length > len(candidates))
    return [[int(i)] for i in ids]
