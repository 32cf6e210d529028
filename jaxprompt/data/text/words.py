"""The vocabulary rows that a soft prompt is initialised from.

Each function returns P lists of token ids: row i is initialised with the mean embedding of list i.
"""

import logging
import re
from collections.abc import Iterable, Sequence

import numpy as np

from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts
from jaxprompt.errors import InputError
from jaxprompt.types import Role

Ids = list[list[int]]
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
    """Chooses token ids by the name of an initialiser; the same seed gives the same ids.

    vocab: sampled from the vocabulary, which is sorted by frequency. Lester et al. (2021) use the
    5,000 most common tokens, PPT (Gu et al. 2022, table 2) all. labels: row i has all token ids of
    class i's words (Lester et al. 2021), text: token i of a text; the remaining rows are as for
    vocab. frequent: sampled from the most frequent tokens of a corpus (PPT, table 2), task: from
    all distinct tokens of the training examples, however rare.

    Args:
      kind: name of the initialiser.
      tokenizer: the tokenizer.
      length: number of rows.
      seed: seed of the sampling.
      vocab_size: number of rows of the embedding; by default the size of the tokenizer.
      counts: number of occurrences of each id: for "frequent" in a corpus, for "task" in the
        training examples.
      labels: token ids of each class's words. Classes beyond `length` are dropped, with a warning.
      text: the text for "text".
      top: how many of the most frequent tokens are sampled from, 0 = all of the vocabulary, and for
        "frequent" TOP.
    """
    # RandomState's streams are frozen by numpy's policy, so a seed always gives the same rows.
    rng = np.random.RandomState(seed)
    no_words = sorted(ids_of_no_word(tokenizer))
    if kind in FROM_TEXT:
        if counts is None:
            text = "the words of a corpus" if kind == "frequent" else "training examples"
            raise InputError(f"prompt.start={kind} needs {text}, but there are none; use vocab")
        candidates = np.setdiff1d(np.flatnonzero(counts), no_words)
        if kind == "frequent":  # equal counts by their ids
            by_count = np.argsort(-counts[candidates], kind="stable")
            candidates = candidates[by_count][: top or TOP]
        return _sample(rng, candidates, length, "the text")
    rows: Ids = []
    if kind == "labels":
        if not labels:
            raise InputError("prompt.start=labels needs label words; set task.words, or use vocab")
        if len(labels) > length:
            logging.getLogger(__name__).warning(
                "%d classes, but only %d soft tokens: the last classes are not used",
                len(labels),
                length,
            )
        rows = [list(ids) for ids in labels[:length]]
    elif kind == "text":
        ids = starting_ids(tokenizer, text.strip())
        rows = [[i] for i in ids[:length]]
        if not rows:
            raise InputError(f"prompt text {text!r} has no tokens; use other words")
        if len(ids) != length:
            rest = "of the text are not used" if len(ids) > length else "are from the vocabulary"
            logging.getLogger(__name__).warning(
                "prompt.text has %d tokens and the prompt %d: the last %d %s",
                len(ids), length, abs(len(ids) - length), rest,
            )  # fmt: skip
    size = min(vocab_size or len(tokenizer), len(tokenizer))  # the embedding may be padded
    candidates = np.setdiff1d(np.arange(min(top or size, size)), no_words)
    return rows + _sample(rng, candidates, length - len(rows), "the vocabulary")


def _sample(rng: np.random.RandomState, candidates: np.ndarray, length: int, source: str) -> Ids:
    """Samples without replacement, or with it if `candidates` is too short."""
    if not len(candidates):
        raise InputError(f"{source} has no words to initialise a soft token from; use other words")
    ids = rng.choice(candidates, length, replace=length > len(candidates))
    return [[int(i)] for i in ids]


def starting_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that initialises embeddings. Raises InputError for unknown words."""
    (ids,) = encode_texts(tokenizer, [text])
    if tokenizer.unk_token_id in ids:
        raise InputError(
            f"prompt.text={text.strip()!r} has words that are not in the vocabulary of "
            f"{tokenizer.name_or_path!r}; choose others"
        )
    return ids
