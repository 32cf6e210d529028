"""What an objective needs of a tokenizer."""

import numpy as np

from jaxprompt.data.text.specials import SENTINEL
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.words import ids_of_no_word
from jaxprompt.errors import InputError

_SPACES = ("Ġ", "Ċ", "ĉ", "č")  # space, newline, tab and return, as byte-level BPE writes them


def need(tokenizer: Tokenizer, name: str, objective: str) -> int:
    """Returns the id of a special token. Raises InputError if the tokenizer has none."""
    number = getattr(tokenizer, f"{name}_token_id", None)
    if number is None:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no {name} token, which {objective} needs; "
            "use an objective that suits its model, or add the token"
        )
    return number


def plain_words(tokenizer: Tokenizer) -> np.ndarray:
    """Lists the ids that are neither special nor unused, ascending. int32 [R]"""
    # Sorted: get_vocab has no fixed order, and every process and resumed run must draw alike.
    known = np.array(sorted(tokenizer.get_vocab().values()), np.int32)
    return np.setdiff1d(known, list(ids_of_no_word(tokenizer))).astype(np.int32)


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Returns which ids begin a word. bool [V]

    With WordPiece these are all but the ones with ##; with byte-level BPE or SentencePiece, only
    the ones with a mark of a space: punctuation after a word is then part of it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner = getattr(getattr(backend, "model", None), "continuing_subword_prefix", None)
    # By its class: a BPE model has a continuing_subword_prefix too, which is None.
    if type(getattr(backend, "model", None)).__name__ == "WordPiece":
        begins = lambda token: not token.startswith(inner)
    # By its text, which also shows a step inside a Sequence.
    elif "ByteLevel" in str(getattr(backend, "pre_tokenizer", "")):
        begins = lambda token: token.startswith(_SPACES)
    # Gemma's normalizer writes it, the others' pre-tokenizer.
    elif "Metaspace" in str(getattr(backend, "pre_tokenizer", "")) or "▁" in str(
        getattr(backend, "normalizer", "")
    ):
        begins = lambda token: token.startswith("▁")
    else:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} does not mark where words begin; whole words "
            "need a WordPiece, byte-level BPE or SentencePiece tokenizer: disable them"
        )
    vocab = tokenizer.get_vocab()
    table = np.zeros(max(vocab.values()) + 1, bool)
    table[[number for token, number in vocab.items() if begins(token)]] = True
    return table


def sentinels(tokenizer: Tokenizer, needed: int, pattern: str = SENTINEL) -> np.ndarray:
    """Returns the ids of the first sentinels, in order. Raises InputError if there are too few."""
    vocab, found = tokenizer.get_vocab(), []
    for number in range(needed):
        name = pattern.format(number)
        known = [vocab[spelt] for spelt in (name, f"▁{name}") if spelt in vocab]  # mT5's have both
        if not known:
            raise InputError(
                f"{needed} sentinels like {pattern.format(0)} are needed, but tokenizer "
                f"{tokenizer.name_or_path!r} has {number}; shorten the input, reduce the density, "
                "lengthen the spans, or set the pattern to the form in the vocabulary"
            )
        found.append(known[0])
    return np.array(found, np.int32)
