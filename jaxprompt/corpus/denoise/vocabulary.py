"""The special tokens, words and sentinels of a tokenizer that objectives use."""

from typing import Any

import numpy as np

from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.words import ids_of_no_word
from jaxprompt.errors import InputError

_SPACES = ("Ġ", "Ċ", "ĉ", "č")  # space, newline, tab and return, as byte-level BPE writes them


def plain_words(tokenizer: Tokenizer) -> np.ndarray:
    """Lists the ids that are neither special nor unused, ascending. int32 [R]"""
    # Sorted: get_vocab has no fixed order, but every process and resumed run must sample alike.
    ids = np.array(sorted(tokenizer.get_vocab().values()), np.int32)
    return np.setdiff1d(ids, list(ids_of_no_word(tokenizer))).astype(np.int32)


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Returns which ids begin a word. bool [V]

    With WordPiece these are all but the ones with ##; with byte-level BPE or SentencePiece, only
    the ones that begin with a space: punctuation after a word is then part of it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model: Any = getattr(backend, "model", None)
    pre_tokenizer = str(getattr(backend, "pre_tokenizer", ""))  # shows the members of a Sequence
    prefixes: tuple[str, ...]
    mark_start = True  # the prefixes are those of words, not of their other tokens
    # By its class: a BPE model has a continuing_subword_prefix too, which is None.
    if type(model).__name__ == "WordPiece":
        prefixes, mark_start = (model.continuing_subword_prefix,), False
    elif "ByteLevel" in pre_tokenizer:
        prefixes = _SPACES
    # Written by the pre-tokenizer, or by the normalizer, as Gemma's.
    elif "Metaspace" in pre_tokenizer or "▁" in str(getattr(backend, "normalizer", "")):
        prefixes = ("▁",)
    else:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} does not mark where words begin; whole words "
            "need a WordPiece, byte-level BPE or SentencePiece tokenizer: disable them"
        )
    vocab = tokenizer.get_vocab()
    starts = np.zeros(max(vocab.values()) + 1, bool)
    starts[[i for token, i in vocab.items() if token.startswith(prefixes) == mark_start]] = True
    return starts
