"""Label words: the subwords of the vocabulary that represent each class."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts
from jaxprompt.errors import InputError


class Verbalizer(NamedTuple):
    """The words of each class and their subwords."""

    words: tuple[tuple[str, ...], ...]  # C tuples of up to W words
    ids: np.ndarray  # int32 [C, W, M] subwords of each word, -1 = none

    @property
    def num_masks(self) -> int:
        """Number of mask positions that the longest word needs, M."""
        return self.ids.shape[2]


def make_verbalizer(
    tokenizer: Tokenizer, words: Sequence[str | Sequence[str]], *, leading_space: bool = True
) -> Verbalizer:
    """Encodes the words of each class, one or several per class.

    With `leading_space` a word is encoded as inside a sentence, which only matters for byte-level
    BPE. A word of several subwords keeps all of them.
    """
    classes = tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in words)
    space = " " if leading_space else ""
    texts = [space + word.strip() for entry in classes for word in entry]
    encoded = iter(encode_texts(tokenizer, texts))  # in one call: there may be thousands of classes
    subwords: list[list[list[int]]] = []
    first_with: dict[tuple[int, ...], tuple[int, str]] = {}
    for c, entry in enumerate(classes):
        subwords.append(list(islice(encoded, len(entry))))
        for word, ids in zip(entry, subwords[-1], strict=True):
            check_word(tokenizer, word, ids, f"label word {word!r} of class {c}")
            # By tokens, because two words with the same tokens would have the same score.
            other, other_word = first_with.setdefault(tuple(ids), (c, word))
            if (other, other_word) != (c, word) or entry.count(word) > 1:
                raise InputError(
                    f"label words {other_word!r} of class {other} and {word!r} of class {c} have "
                    "the same tokens; use different words for each class"
                )
    num_words = max(map(len, classes))
    num_masks = max(len(ids) for entry in subwords for ids in entry)
    table = np.full((len(classes), num_words, num_masks), -1, np.int32)  # [C, W, M]
    for c, encodings in enumerate(subwords):
        for w, encoding in enumerate(encodings):
            table[c, w, : len(encoding)] = encoding
    return Verbalizer(classes, table)


def check_word(tokenizer: Tokenizer, word: str, ids: Sequence[int], description: str) -> None:
    """Raises InputError for a word without tokens or with unknown ones."""
    if not word.strip() or not ids:
        raise InputError(f"{description} is empty; give a word")
    if tokenizer.unk_token_id in ids:
        raise InputError(
            f"{description} is not in the vocabulary of {tokenizer.name_or_path!r}; choose "
            "another word"
        )
