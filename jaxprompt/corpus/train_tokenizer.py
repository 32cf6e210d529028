"""Trains a tokenizer on a corpus, in the form that the models of its family expect."""

import functools
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

from jaxprompt.corpus.read import DocumentSource, TextSettings
from jaxprompt.data.text.tokenizer import Tokenizer, load_tokenizer, parse_pieces
from jaxprompt.errors import InputError, at_least, check_known
from jaxprompt.files import dumps, make_folder, read_json, write_atomic, write_error

SENTINELS = 100  # of T5, <extra_id_0> being the last id

_FAMILIES = {
    "bert": "wordpiece", "electra": "wordpiece", "roberta": "bpe", "gpt2": "bpe", "t5": "unigram",
}  # fmt: skip
_FIRST_SPECIALS = {  # before all words of a vocabulary, in the order of the released ones
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "electra": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>"],
    "gpt2": [],
    "t5": ["<pad>", "</s>", "<unk>"],
}
_LAST_SPECIALS = {  # after all words
    "roberta": ["<mask>"],
    "gpt2": ["<|endoftext|>"],
    "t5": [f"<extra_id_{i}>" for i in reversed(range(SENTINELS))],
}
_MIN_SIZES = {"wordpiece": 100, "bpe": 300, "unigram": 200}  # bytes alone are 256
_MAX_SIZE = 1_000_000  # the trainers allocate memory for all
_RECORD = "trained_from.json"  # the text and options that a tokenizer was trained with
_SPACE = re.compile(r"[ \t\n\r]+")  # what separates words for WordPiece; it drops other controls
_BLOCK = 5000  # characters of a text that must contain a boundary, see `_divide_runs`
_RUN = re.compile(r"\w+|\s+|[^\w\s]+")
_THREADS = 8  # of SentencePiece, whose sums depend on their number


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
    kind = _FAMILIES[check_known("the tokenizer family", family, _FAMILIES)]
    at_least(f"vocab_size of a {kind} tokenizer", vocab_size, _MIN_SIZES[kind])
    if vocab_size > _MAX_SIZE:
        raise InputError(f"vocab_size={vocab_size} must be at most {_MAX_SIZE:,}")
    folder = make_folder(folder)
    if (folder / "config.json").exists():  # it would be read in place of the model's own
        raise InputError(f"{folder} has a model with its tokenizer; use another folder")
    exists, record_path = (folder / "tokenizer.json").exists(), folder / _RECORD
    if exists and not record_path.is_file():
        raise InputError(f"{folder} already has a tokenizer.json; delete it, or use another folder")
    documents = DocumentSource(source, settings or TextSettings(), cache_dir)
    # A pass for the size alone, on which the choice of documents depends.
    num_chars, digest = 0, hashlib.sha256()
    for text in documents:
        num_chars += len(text)
        digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    if not num_chars:
        raise InputError(f"corpus {source!r} is empty: there is no text to train a tokenizer on")
    record = dict(
        family=family,
        vocab_size=vocab_size,
        lowercase=lowercase,
        max_chars=max_chars,
        sha256=digest.hexdigest(),
    )
    if not exists:
        options = {"do_lower_case": lowercase} if kind == "wordpiece" else {}
        every = -(-num_chars // max_chars)
        sample = functools.partial(islice, documents, 0, None, every)
        tokenizer = _train(family, lambda: map(_divide_runs, sample()), vocab_size, options)
        write_atomic(record_path, dumps(record, indent=2))
        _save(tokenizer, folder)
    elif read_json(record_path, "what trained a tokenizer") != record:
        raise InputError(
            f"{folder} already has a tokenizer.json of other options or another text; delete it, "
            "or use another folder"
        )
    return load_tokenizer(folder)


def _divide_runs(text: str) -> str:
    """Divides long words, so that none has over 10,000 characters, and shortens white space.

    The time of the trainers is quadratic in the length of a word: 200,000 letters took 65 seconds
    with BPE and 86 with WordPiece.
    """
    blocks = [text[i : i + _BLOCK] for i in range(0, len(text), _BLOCK)]
    for i, block in enumerate(blocks):
        if len(block) == _BLOCK and _RUN.fullmatch(block):
            blocks[i] = "" if block.isspace() else f"{block} "
    return "".join(blocks)


def _train(
    family: str, texts: Callable[[], Iterator[str]], vocab_size: int, options: dict[str, Any]
) -> Tokenizer:
    """Trains with the family's normalizer and pre-tokenizer, then adds the vocabulary.

    Each call of `texts` iterates over the documents from the start.
    """
    import transformers

    # The type stubs of transformers lack this name.
    electra = transformers.ElectraTokenizer  # type: ignore[attr-defined]
    classes = {
        "bert": transformers.BertTokenizer, "electra": electra,
        "roberta": transformers.RobertaTokenizer, "gpt2": transformers.GPT2Tokenizer,
        "t5": transformers.T5Tokenizer,
    }  # fmt: skip
    # Even without a vocabulary it has the family's normalizer and pre-tokenizer.
    backend = classes[family](**options).backend_tokenizer
    # Trainers put special tokens first; those after all words are added here.
    kind, last = _FAMILIES[family], _LAST_SPECIALS.get(family, [])
    size = vocab_size - len(last)
    try:
        if kind == "unigram":
            # Its vocabulary is a list of subwords with scores; the others map a token to its id.
            subwords = _train_unigram(texts(), size)
            vocab = [*subwords, *((name, 0.0) for name in last)]
            return classes[family](vocab=vocab, **options)
        train = _train_wordpiece if kind == "wordpiece" else _train_bpe
        model = train(backend, texts, size, _FIRST_SPECIALS[family])
    # The texts are read inside of the trainer, and their errors pass through it.
    except InputError:
        raise
    except Exception as error:  # the Rust trainers raise no other class, SentencePiece RuntimeError
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
    backend: Any, texts: Callable[[], Iterator[str]], size: int, specials: list[str]
) -> dict[str, Any]:
    """Trains a byte-level BPE, whose trainer breaks ties by ids and gives bytes theirs in order."""
    from tokenizers import models, pre_tokenizers, trainers

    # All 256 bytes, so that no text is unknown whatever the corpus lacks.
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=specials,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    return _fit(backend, texts(), models.BPE(), trainer)


def _train_wordpiece(
    backend: Any, texts: Callable[[], Iterator[str]], size: int, specials: list[str]
) -> dict[str, Any]:
    """Trains a WordPiece. At most a third are characters, if there are enough words."""
    from tokenizers import models, trainers

    words = _count_words(backend, texts())
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    by_count = sorted(counts, key=lambda character: (-counts[character], character))
    inner = sorted({character for word in words for character in word[1:]})

    def fit(num_characters: int) -> dict[str, Any]:
        # Rare characters become [UNK]: else they fill the vocabulary.
        alphabet = sorted(by_count[:num_characters])
        # The trainer breaks ties by ids and gives ##a its id at its first occurrence in a word, in
        # an order that differs between processes. Tokens called special have their ids beforehand.
        first = [*specials, *alphabet, *(f"##{x}" for x in inner if x in set(alphabet))]
        trainer = trainers.WordPieceTrainer(
            vocab_size=size,
            special_tokens=first,
            show_progress=False,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
        )
        return _fit(backend, texts(), models.WordPiece(unk_token="[UNK]"), trainer)

    model = fit(size // 3)
    free, num_characters = size - len(model["vocab"]), sum(len(x) == 1 for x in model["vocab"])
    if not free or num_characters < size // 3:
        return model
    # Every Chinese character is a word and nothing is merged: there is space for more characters.
    num_characters = size // 3 + free
    wider = fit(num_characters)
    while len(wider["vocab"]) > size:  # characters within words are in it a second time, with ##
        num_characters -= len(wider["vocab"]) - size
        wider = fit(num_characters)
    return max(model, wider, key=lambda model: len(model["vocab"]))


def _count_words(backend: Any, texts: Iterator[str]) -> Counter[str]:
    """Counts the words that a tokenizer's normalizer and pre-tokenizer produce."""
    chunks: Counter[str] = Counter()
    for text in texts:
        chunks.update(_SPACE.split(text))
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        normalized = backend.normalizer.normalize_str(chunk)
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(normalized):
            words[word] += count
    return words


def _fit(backend: Any, texts: Iterator[str], model: Any, trainer: Any) -> dict[str, Any]:
    """Trains a model after the normalizer and pre-tokenizer of `backend`.

    Returns the model as in tokenizer.json.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    if backend.normalizer is not None:
        tokenizer.normalizer = backend.normalizer
    tokenizer.pre_tokenizer = backend.pre_tokenizer
    tokenizer.train_from_iterator(texts, trainer)
    return json.loads(tokenizer.to_str())["model"]


def _train_unigram(texts: Iterator[str], size: int) -> list[tuple[str, float]]:
    """Trains a Unigram with SentencePiece, as T5's was; returns its subwords and their scores.

    The trainer of `tokenizers` sums in a different order in each process.
    """
    import sentencepiece

    words: Counter[str] = Counter()
    for text in texts:
        words.update(text.split())
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
        input_format="tsv",
        model_writer=model,
        vocab_size=size,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        max_sentence_length=2**30,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=_THREADS,
        minloglevel=2,
    )
    return [(entry.piece, entry.score) for entry in parse_pieces(model.getvalue()).pieces]


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files, each completely or not at all."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            # tokenizer.json last: if it exists, all of them do.
            for file in sorted(Path(scratch).iterdir(), key=lambda path: path.name, reverse=True):
                write_atomic(folder / file.name, file.read_bytes())
    except OSError as error:
        raise write_error(folder, error) from error
