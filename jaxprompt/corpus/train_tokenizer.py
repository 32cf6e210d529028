"""Training of a tokenizer from a corpus, in the form that its family's models expect."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jaxprompt.corpus.read import Source, TextSettings
from jaxprompt.data.tokenizer import load_tokenizer
from jaxprompt.errors import InputError, at_least, nearest
from jaxprompt.files import make_folder, write_atomic, write_error

SENTINELS = 100  # of T5, <extra_id_0> being the last id

_FAMILIES = {
    "bert": "wordpiece", "electra": "wordpiece", "roberta": "bpe", "gpt2": "bpe", "t5": "unigram",
}  # fmt: skip
_FIRST = {  # the specials in front of a vocabulary, in the order of the released ones
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "electra": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>"],
    "gpt2": [],
    "t5": ["<pad>", "</s>", "<unk>"],
}
_LAST = {
    "roberta": ["<mask>"],
    "gpt2": ["<|endoftext|>"],
    "t5": [f"<extra_id_{i}>" for i in reversed(range(SENTINELS))],
}
_SMALLEST = {"wordpiece": 100, "bpe": 300, "unigram": 200}  # bytes alone are 256


def train_tokenizer(
    family: str,
    source: str,
    folder: str | os.PathLike,
    vocab_size: int,
    settings: TextSettings | None = None,
    *,
    lowercase: bool = True,
    max_chars: int = 10**8,
    cache_dir: str | None = None,
) -> Any:
    """Trains the tokenizer of `family` on the documents of `source`, writes it, and loads it.

    WordPiece for bert and electra, byte-level BPE for roberta and gpt2, Unigram with sentinels for
    t5, whose released normalization of characters is not learned and so is left out. The
    vocabulary, specials included, has `vocab_size` tokens or the fewer that the text gives.
    `lowercase` is WordPiece's. Over `max_chars` every k-th document is taken.
    """
    if family not in _FAMILIES:
        raise InputError(f"no tokenizer family {family!r}; {nearest(family, _FAMILIES)}")
    kind = _FAMILIES[family]
    at_least(f"vocab_size of a {kind} tokenizer", vocab_size, _SMALLEST[kind])
    folder = make_folder(folder)
    if (folder / "tokenizer.json").exists():
        raise InputError(f"{folder} has a tokenizer.json already; delete it or take another folder")
    if (folder / "config.json").exists():  # it would be read in place of the model's own
        raise InputError(f"{folder} holds a model with its own tokenizer; give another folder")
    texts = Source(source, settings or TextSettings(), cache_dir)
    # A pass for the size alone: which documents are taken depends on it.
    size = sum(map(len, texts))
    if not size:
        raise InputError(f"corpus {source!r} is empty: there is nothing to train a tokenizer on")
    options = {"do_lower_case": lowercase} if kind == "wordpiece" else {}
    chosen = lambda: islice(texts, 0, None, -(-size // max_chars))
    tokenizer = _train(family, chosen, vocab_size, options)
    _save(tokenizer, folder)
    return load_tokenizer(folder)


def _train(
    family: str, texts: Callable[[], Iterator[str]], vocab_size: int, options: dict[str, Any]
) -> Any:
    """Trains with the family's own steps before the model; then puts the vocabulary into it.

    `texts` begins the documents anew.
    """
    import transformers

    classes = {
        "bert": transformers.BertTokenizer, "electra": transformers.ElectraTokenizer,
        "roberta": transformers.RobertaTokenizer, "gpt2": transformers.GPT2Tokenizer,
        "t5": transformers.T5Tokenizer,
    }  # fmt: skip
    # Made without a vocabulary, it still has the family's normalizer and pre-tokenizer.
    steps = classes[family](**options).backend_tokenizer
    # Trainers put special tokens in front; those that stand behind all words are added afterwards.
    kind, last = _FAMILIES[family], _LAST.get(family, [])
    size = vocab_size - len(last)

    def fit(alphabet: int) -> dict[str, Any]:
        try:
            return _fit(steps, texts(), *_trainer(kind, size, _FIRST[family], alphabet))
        # The texts are read inside of the trainer, and their errors pass through it.
        except InputError:
            raise
        except Exception as error:  # the Rust trainers know no other kind
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"no {family} tokenizer of {vocab_size} tokens can be trained on this text "
                f"({reason}); take another vocab_size, or more text"
            ) from error

    found = fit(size // 3)
    room, characters = size - len(found["vocab"]), sum(len(x) == 1 for x in found["vocab"])
    if kind == "wordpiece" and room and characters >= size // 3:
        # Every Chinese character is a word, and nothing is merged: the room is for more of them.
        wider, alphabet = fit(size // 3 + room), size // 3 + room
        while len(wider["vocab"]) > size:  # characters within words stand there a second time
            alphabet -= len(wider["vocab"]) - size
            wider = fit(alphabet)
        found = max(found, wider, key=lambda model: len(model["vocab"]))
    if kind == "unigram":
        # Unigram's vocabulary is a list of pieces with scores; the others map a token to its id.
        vocab = [tuple(piece) for piece in found["vocab"]] + [(name, 0.0) for name in last]
        return classes[family](vocab=vocab, **options)
    vocab = found["vocab"] | {name: len(found["vocab"]) + i for i, name in enumerate(last)}
    if kind == "bpe":
        options = {"merges": [tuple(pair) for pair in found["merges"]], **options}
    return classes[family](vocab=vocab, **options)


def _fit(steps: Any, texts: Iterator[str], model: Any, trainer: Any) -> dict[str, Any]:
    """Trains a model behind the steps of another tokenizer. -> it, as tokenizer.json has it"""
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    if steps.normalizer is not None:
        backend.normalizer = steps.normalizer
    backend.pre_tokenizer = steps.pre_tokenizer
    backend.train_from_iterator(texts, trainer)
    return json.loads(backend.to_str())["model"]


def _trainer(kind: str, size: int, specials: list[str], alphabet: int) -> tuple[Any, Any]:
    """Makes a model and its trainer; at most `alphabet` characters are known to WordPiece."""
    from tokenizers import models, pre_tokenizers, trainers

    common = dict(vocab_size=size, special_tokens=specials, show_progress=False)
    if kind == "wordpiece":
        # Rare characters become [UNK]: else they fill the vocabulary.
        trainer = trainers.WordPieceTrainer(limit_alphabet=alphabet, **common)
        return models.WordPiece(unk_token="[UNK]"), trainer
    if kind == "bpe":
        # All 256 bytes, so that no text is unknown whatever the corpus lacks.
        known = pre_tokenizers.ByteLevel.alphabet()
        return models.BPE(), trainers.BpeTrainer(initial_alphabet=known, **common)
    return models.Unigram(), trainers.UnigramTrainer(unk_token="<unk>", **common)


def _save(tokenizer: Any, folder: Path) -> None:
    """Writes the tokenizer's files, each whole or not at all."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            tokenizer.save_pretrained(scratch)
            # tokenizer.json comes last: where it stands all stands.
            for file in sorted(Path(scratch).iterdir(), key=lambda path: path.name, reverse=True):
                write_atomic(folder / file.name, file.read_bytes())
    except OSError as error:
        raise write_error(folder, error) from error
