"""Trains a tokenizer on a corpus, in the form that the models of its family expect."""

import hashlib
import io
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jaxprompt.corpus.read import Source, TextSettings
from jaxprompt.data.text.tokenizer import Tokenizer, load_tokenizer, parse_pieces
from jaxprompt.errors import InputError, at_least, nearest
from jaxprompt.files import dumps, make_folder, read_json, write_atomic, write_error

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
_LARGEST = 10**6  # for which the trainers reserve memory at once
_RECORD = "trained_from.json"  # what a tokenizer was trained from
_SPACE = re.compile(r"[ \t\n\r]+")  # at which words end for WordPiece; it drops other controls
_THREADS = 8  # of SentencePiece, whose sums depend on how many there are


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
) -> Tokenizer:
    """Trains the tokenizer of `family` on the documents of `source`, saves it, and loads it.

    It is a WordPiece for bert and electra, a byte-level BPE for roberta and gpt2, a Unigram with
    sentinels for t5. T5's released normalization of characters is not learned and therefore
    omitted. The same text and arguments give the same tokenizer; if it is in `folder` already, it
    is loaded.

    Args:
      family: bert, electra, roberta, gpt2 or t5.
      source: the corpus.
      folder: where the tokenizer is saved.
      vocab_size: tokens of the vocabulary, special tokens included, or fewer if the text gives
        fewer.
      settings: how the corpus is read.
      lowercase: only for WordPiece.
      max_chars: if the text is longer, every k-th document is used.
      cache_dir: where downloads are cached.
    """
    if family not in _FAMILIES:
        raise InputError(f"no tokenizer family {family!r}; {nearest(family, _FAMILIES)}")
    kind = _FAMILIES[family]
    at_least(f"vocab_size of a {kind} tokenizer", vocab_size, _SMALLEST[kind])
    if vocab_size > _LARGEST:
        raise InputError(
            f"vocab_size of a {kind} tokenizer={vocab_size} must be at most {_LARGEST}"
        )
    folder = make_folder(folder)
    if (folder / "config.json").exists():  # it would be read in place of the model's own
        raise InputError(f"{folder} has a model with its tokenizer; use another folder")
    is_there, path = (folder / "tokenizer.json").exists(), folder / _RECORD
    taken = f"{folder} already has a tokenizer.json; delete it, or use another folder"
    if is_there and not path.is_file():
        raise InputError(taken)
    texts = Source(source, settings or TextSettings(), cache_dir)
    # A pass for the size alone: which documents are taken depends on it.
    size, digest = 0, hashlib.sha256()
    for text in texts:
        size += len(text)
        digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    if not size:
        raise InputError(f"corpus {source!r} is empty: there is no text to train a tokenizer on")
    record = dict(
        family=family, vocab_size=vocab_size, lowercase=lowercase, max_chars=max_chars,
        sha256=digest.hexdigest(),
    )  # fmt: skip
    if not is_there:
        options = {"do_lower_case": lowercase} if kind == "wordpiece" else {}
        chosen = lambda: islice(texts, 0, None, -(-size // max_chars))
        tokenizer = _train(family, chosen, vocab_size, options)
        write_atomic(path, dumps(record, indent=2))
        _save(tokenizer, folder)
    elif read_json(path, "what trained a tokenizer") != record:
        raise InputError(
            f"{folder} already has a tokenizer.json of other options or another text; delete it, "
            "or use another folder"
        )
    return load_tokenizer(folder)


def _train(
    family: str, texts: Callable[[], Iterator[str]], vocab_size: int, options: dict[str, Any]
) -> Tokenizer:
    """Trains with the family's normalizer and pre-tokenizer, then adds the vocabulary.

    `texts` starts the documents again.
    """
    import transformers

    # Among the names of transformers' own types this one is missing.
    electra = transformers.ElectraTokenizer  # type: ignore[attr-defined]
    classes = {
        "bert": transformers.BertTokenizer, "electra": electra,
        "roberta": transformers.RobertaTokenizer, "gpt2": transformers.GPT2Tokenizer,
        "t5": transformers.T5Tokenizer,
    }  # fmt: skip
    # Made without a vocabulary, it still has the family's normalizer and pre-tokenizer.
    steps = classes[family](**options).backend_tokenizer
    # Trainers put special tokens in front; those that stand behind all words are added afterwards.
    kind, last = _FAMILIES[family], _LAST.get(family, [])
    size = vocab_size - len(last)
    try:
        if kind == "unigram":
            # Its vocabulary is a list of pieces with scores; the others map a token to its id.
            pieces = _train_unigram(texts(), size)
            vocab = [*pieces, *((name, 0.0) for name in last)]
            return classes[family](vocab=vocab, **options)
        train = _train_wordpiece if kind == "wordpiece" else _train_bpe
        model = train(steps, texts, size, _FIRST[family])
    # The texts are read inside of the trainer, and their errors pass through it.
    except InputError:
        raise
    except Exception as error:  # the Rust trainers know no other kind, SentencePiece RuntimeError
        reason = " ".join(str(error).split()).rpartition("] ")[2][:200]
        raise InputError(
            f"no {family} tokenizer of {vocab_size} tokens can be trained on this text ({reason}); "
            "use another vocab_size, or more text"
        ) from error
    vocab = model["vocab"] | {name: len(model["vocab"]) + i for i, name in enumerate(last)}
    if kind == "bpe":
        options = {"merges": [tuple(pair) for pair in model["merges"]], **options}
    return classes[family](vocab=vocab, **options)


def _train_bpe(
    steps: Any, texts: Callable[[], Iterator[str]], size: int, specials: list[str]
) -> dict[str, Any]:
    """Trains a byte-level BPE, whose trainer breaks ties by ids and gives bytes theirs in order."""
    from tokenizers import models, pre_tokenizers, trainers

    # All 256 bytes, so that no text is unknown whatever the corpus lacks.
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    return _fit(steps, texts(), models.BPE(), trainer)


def _train_wordpiece(
    steps: Any, texts: Callable[[], Iterator[str]], size: int, specials: list[str]
) -> dict[str, Any]:
    """Trains a WordPiece. At most a third are characters, if there are enough words."""
    from tokenizers import models, trainers

    words = _count_words(steps, texts())
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    by_count = sorted(counts, key=lambda character: (-counts[character], character))
    inner = sorted({character for word in words for character in word[1:]})

    def fit(alphabet: int) -> dict[str, Any]:
        # Rare characters become [UNK]: else they fill the vocabulary.
        chosen = sorted(by_count[:alphabet])
        # The trainer breaks ties by ids, and gives ##a one when it meets it in a word: in an order
        # that differs from process to process. Tokens called special have theirs beforehand.
        first = [*specials, *chosen, *(f"##{x}" for x in inner if x in set(chosen))]
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=first, show_progress=False, initial_alphabet=chosen,
            limit_alphabet=len(chosen),
        )  # fmt: skip
        return _fit(steps, texts(), models.WordPiece(unk_token="[UNK]"), trainer)

    found = fit(size // 3)
    room, characters = size - len(found["vocab"]), sum(len(x) == 1 for x in found["vocab"])
    if not room or characters < size // 3:
        return found
    # Every Chinese character is a word, and nothing is merged: the room is for more of them.
    wider, alphabet = fit(size // 3 + room), size // 3 + room
    while len(wider["vocab"]) > size:  # characters within words stand there a second time
        alphabet -= len(wider["vocab"]) - size
        wider = fit(alphabet)
    return max(found, wider, key=lambda model: len(model["vocab"]))


def _count_words(steps: Any, texts: Iterator[str]) -> Counter[str]:
    """Counts the words that a tokenizer's normalizer and pre-tokenizer produce."""
    chunks: Counter[str] = Counter()
    for text in texts:
        chunks.update(_SPACE.split(text))
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        normalized = steps.normalizer.normalize_str(chunk)
        for word, _ in steps.pre_tokenizer.pre_tokenize_str(normalized):
            words[word] += count
    return words


def _fit(steps: Any, texts: Iterator[str], model: Any, trainer: Any) -> dict[str, Any]:
    """Trains a model after the steps of another tokenizer; returns it as in tokenizer.json."""
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    if steps.normalizer is not None:
        backend.normalizer = steps.normalizer
    backend.pre_tokenizer = steps.pre_tokenizer
    backend.train_from_iterator(texts, trainer)
    return json.loads(backend.to_str())["model"]


def _train_unigram(texts: Iterator[str], size: int) -> list[tuple[str, float]]:
    """Trains a Unigram with SentencePiece, as T5's was; returns its pieces with their scores.

    The trainer of `tokenizers` sums in a different order in each process.
    """
    import sentencepiece

    words: Counter[str] = Counter()
    for text in texts:
        words.update(text.split())
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
        input_format="tsv", model_writer=written, vocab_size=size, hard_vocab_limit=False,
        normalization_rule_name="identity", character_coverage=1.0, max_sentence_length=2**30,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=_THREADS, minloglevel=2,
    )  # fmt: skip
    return [(piece.piece, piece.score) for piece in parse_pieces(written.getvalue()).pieces]


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files, each completely or not at all."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            # tokenizer.json comes last: where it stands all stands.
            for file in sorted(Path(scratch).iterdir(), key=lambda path: path.name, reverse=True):
                write_atomic(folder / file.name, file.read_bytes())
    except OSError as error:
        raise write_error(folder, error) from error
