"""Loads a backbone's tokenizer, from a folder or the hub cache."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.data.text.gguf_tokenizer import tokenizer_folder
from jaxprompt.errors import InputError, first_line
from jaxprompt.files import read_json, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to import

_TOKENIZER_FILE = "tokenizer.json"
_PRECOMPILED, _BYTE_LEVEL = "Precompiled", "ByteLevel"  # steps of a tokenizer
_MAX_CAPITALS = 0.1  # of a cased vocabulary about a third of the words have some
_RARE = "\U0001242b"  # a cuneiform sign, which needs the unknown token or bytes
_SECTIONS = "spaced_sections"  # an attribute: tokenizers of transformers take any
# Options for the subwords of a text alone, in which names of special tokens stay plain text.
_PLAIN = {
    "add_special_tokens": False,
    "split_special_tokens": True,
    "padding": False,
    "truncation": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "verbose": False,
}


def load_tokenizer(
    folder_or_id: str | os.PathLike, revision: str | None = None, *, released: bool = False
) -> Tokenizer:
    """Loads a transformers tokenizer; never runs code that comes with it.

    The source is a folder (with tokenizer.json, or the vocabulary files and a config.json that
    names the family), a .gguf file, or else a hub id. White space is taken as written, so that
    texts can be concatenated; with `released`, as the released tokenizer takes it.
    """
    # Its warning that torch is missing does not concern tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, BertTokenizer

    name = str(user_path(folder_or_id))
    folder = str(tokenizer_folder(name)) if is_gguf(name) else name
    if not os.path.isdir(folder) and (os.path.isabs(name) or name.startswith(".")):
        raise InputError(f"tokenizer {name!r}: no such folder; use a folder or a hub id")
    try:
        if is_unnamed_bert(Path(folder)):
            tokenizer = BertTokenizer.from_pretrained(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, revision=revision, trust_remote_code=False
            )
        if _is_empty(tokenizer) and os.path.isfile(os.path.join(folder, "vocab.txt")):
            # An ALBERT or RoBERTa with a BERT's vocabulary, such as Chinese ones.
            tokenizer = BertTokenizer.from_pretrained(folder)
        tokenizer = _as_written(tokenizer, folder, revision)
    # transformers lets errors of every file reader through: JSON, the hub, the Rust tokenizer.
    except Exception as error:
        reason = first_line(error)
        if code := _custom_class(Path(folder)):
            reason = f"its class {code} is code in its folder, which is never run"
        raise InputError(
            f"tokenizer {name!r} cannot be read ({reason}); it needs tokenizer.json, or vocab.txt, "
            "vocab.json + merges.txt or SentencePiece's file with a config.json that has the "
            "model_type"
        ) from error
    # Without a vocabulary file transformers builds an empty tokenizer and stays silent.
    if _is_empty(tokenizer):
        raise InputError(
            f"tokenizer {name!r} has {len(tokenizer)} tokens, all special; "
            "add tokenizer.json or the vocabulary files to the folder"
        )
    tokenizer.name_or_path = name  # messages show it
    _check_case(tokenizer, folder)
    if not released:
        _take_spaces_as_written(tokenizer)
    encode_texts(tokenizer, [_RARE])
    highest, token = max((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    if highest >= 2**31:
        raise InputError(
            f"tokenizer {name!r} gives {token!r} the id {highest}, and ids must be below 2**31; "
            "its files are damaged: download them again"
        )
    return tokenizer


def is_unnamed_bert(folder: Path) -> bool:
    """Returns whether a folder is a BERT without model_type in its config, such as SciBERT."""
    path = folder / "config.json"
    if not os.path.isfile(path) or not os.path.isfile(folder / "vocab.txt"):
        return False
    config = read_json(path, "a backbone folder as save_pretrained writes it")
    # ALBERT and ELECTRA have an embedding_size.
    return "type_vocab_size" in config and config.keys().isdisjoint(
        ["model_type", "embedding_size"]
    )


def _custom_class(folder: Path) -> str:
    """Returns the tokenizer's class if it is code in its folder, else ""."""
    path = folder / "tokenizer_config.json"
    is_file = os.path.isfile(path)  # unlike Path.is_file, False for a folder without permission
    config = read_json(path, "a file of transformers' tokenizers") if is_file else {}
    name = config.get("auto_map") and config.get("tokenizer_class")
    return name if isinstance(name, str) else ""


def _is_empty(tokenizer: Tokenizer) -> bool:
    return len(tokenizer) <= len(tokenizer.all_special_ids)


def _as_written(tokenizer: Any, where: str, revision: str | None) -> Any:
    """Restores a tokenizer's steps, model and added tokens from its tokenizer.json.

    The classes of transformers 5 read only the vocabulary of that file and use their default steps
    (transformers#45812, #45920). Their special tokens and settings are kept. If the model_type is
    of another kind, such as GPT-2 for a file without byte-level BPE, only the file and its config
    count. If there is only SentencePiece's file, DeBERTa's class drops its character map.
    """
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    path = cached_file(
        where,
        _TOKENIZER_FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        _restore_charsmap(backend, Path(where) / "spm.model")
        return tokenizer
    original = Backend.from_file(path)
    if _kind(backend) != _kind(original):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(where, revision=revision or "main")
    added = {token.content: token for token in original.get_added_tokens_decoder().values()}
    for _, token in sorted(tokenizer.added_tokens_decoder.items()):
        # A token that the class or config calls special stays special, so no text encodes to it.
        added.setdefault(token.content, token).special |= token.special
    original.add_tokens(list(added.values()))
    tokenizer._tokenizer = original  # transformers has no public setter
    return tokenizer


def _kind(backend: Any) -> tuple[str, bool]:
    """Returns the class of a tokenizer's model, and whether its subwords are made of bytes."""
    return type(backend.model).__name__, _BYTE_LEVEL in str(backend.pre_tokenizer)


def _restore_charsmap(backend: Any, pieces: Path) -> None:
    """Adds the character map of SentencePiece's file before a normalizer without one."""
    from tokenizers import normalizers

    if _PRECOMPILED in str(backend.normalizer) or not pieces.is_file():
        return
    charsmap = parse_pieces(pieces.read_bytes()).normalizer_spec.precompiled_charsmap
    if charsmap:
        steps = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap), *steps])


def parse_pieces(data: bytes) -> Any:
    """Parses SentencePiece's file; returns its ModelProto, a protobuf message."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made when imported
    model.ParseFromString(data)
    return model


def _check_case(tokenizer: Tokenizer, where: str) -> None:
    """Raises InputError if a tokenizer lower-cases by default but its vocabulary has capitals."""
    path = Path(where) / "tokenizer_config.json"
    if (Path(where) / _TOKENIZER_FILE).is_file() or not getattr(tokenizer, "do_lower_case", False):
        return
    if path.is_file() and "do_lower_case" in read_json(path, "a file of transformers' tokenizers"):
        return
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    capital = sum(word != word.lower() for word in words)
    if capital > _MAX_CAPITALS * len(words):
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} would lower-case texts, but {capital:,} of its "
            f'{len(words):,} words have capitals; write {{"do_lower_case": false}} in '
            "tokenizer_config.json, or true if you want that"
        )


def num_segments(tokenizer: Tokenizer, types: int) -> int:
    """Returns the number of segments of an input: 1 if the tokenizer has no second, as XLM-R's.

    A BERT with such a tokenizer, such as multilingual E5, was trained on one.
    """
    name = "token_type_ids"
    if types < 2 or name in getattr(tokenizer, "model_input_names", [name]):
        return types
    return types if any(tokenizer("a", "a", return_token_type_ids=True)[name]) else 1


def starts_with_space(tokenizer: Tokenizer) -> bool:
    """Returns whether the first word of an input has a leading space, as in SentencePiece."""
    return spaced_sections(tokenizer) != "never"


def keeps_spaces(tokenizer: Tokenizer) -> bool:
    """Returns whether a word after a space has other ids than one that begins a text."""
    first, inner = encode_texts(tokenizer, ["a", " a"])
    return first != inner


def takes_one_space(tokenizer: Tokenizer) -> bool:
    """Returns whether white space of any length is one space, or none, as for T5 and BERT."""
    single, double = encode_texts(tokenizer, ["a b", "a  b"])
    return single == double


def spaced_sections(tokenizer: Tokenizer) -> str:
    """Returns which sections between added tokens the released tokenizer puts a space before.

    "always" each of them, "first" the one that begins the text, "never" none.
    """
    return getattr(tokenizer, _SECTIONS, "never")


def _take_spaces_as_written(tokenizer: Tokenizer) -> None:
    """Makes a tokenizer take spaces as written, so that texts can be concatenated.

    As released, SentencePiece's and some byte-level BPE tokenizers put a space before every text,
    also before text that follows without one. If white space of any length is one space, as for T5,
    it still is.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    steps = _steps(backend.pre_tokenizer, "pretokenizers")
    normalizer_steps = _steps(backend.normalizer, "normalizers")
    if not steps and [step["type"] for step in normalizer_steps[-2:]] == ["Prepend", "Replace"]:
        # Llama 2's earlier form: the same function as two replacements.
        replacement = normalizer_steps[-2]["prepend"]
        steps = [{"type": "Metaspace", "replacement": replacement, "split": False}]
        normalizer_steps, scheme = normalizer_steps[:-2], "always"
    elif metaspaces := [step for step in steps if step["type"] == "Metaspace"]:
        scheme = metaspaces[0]["prepend_scheme"]
    elif steps and steps[0]["type"] == _BYTE_LEVEL and steps[0]["add_prefix_space"]:
        scheme = "always"
    else:
        return
    spaced_steps = [step for step in steps if step["type"] != "WhitespaceSplit"]
    for step in spaced_steps:
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        elif step["type"] == _BYTE_LEVEL:
            step["add_prefix_space"] = False
    state = {"type": "Sequence", "pretokenizers": spaced_steps}
    backend.pre_tokenizer = _with_state(pre_tokenizers.Sequence([]), state)
    state = {
        "type": "Sequence",
        "normalizers": [y for x in normalizer_steps for y in _keep_one_space(x)],
    }
    normalizer = _with_state(normalizers.Sequence([]), state)
    if spaced_steps != steps:
        # WhitespaceSplit drops every space. One at the end would be a token by itself.
        spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Replace(Regex(" $"), "")]
        normalizer = normalizers.Sequence([normalizer, *spaces])
    backend.normalizer = normalizer
    setattr(tokenizer, _SECTIONS, scheme)


def _keep_one_space(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Replaces a step that strips leading white space by one that leaves one space."""
    if step["type"] != "Strip" or not step["strip_left"]:
        return [step]
    first = {"type": "Replace", "pattern": {"Regex": r"\A\s+"}, "content": " "}
    return [first, step | {"strip_left": False}]


def _steps(stage: Any, name: str) -> list[dict[str, Any]]:
    """Lists the steps of a normalizer or pre-tokenizer as tokenizer.json has them."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [y for x in state[name] for y in flat(x)] if state["type"] == "Sequence" else [state]

    return [] if stage is None else flat(json.loads(stage.__getstate__()))


def _with_state(stage: Any, state: dict[str, Any]) -> Any:
    """Sets the state of a normalizer or pre-tokenizer, as tokenizer.json would have it."""
    stage.__setstate__(json.dumps(state).encode())
    return stage


def encode_with_offsets(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> dict[str, tuple[list[int], np.ndarray]]:
    """Encodes texts alone, including leading white space.

    Returns:
      For each text its ids, and the character span of each, int32 [T, 2].

    Raises:
      InputError: for a slow tokenizer of transformers, which has no offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} does not return offsets; save it with a "
            "tokenizer.json"
        )
    texts = list(dict.fromkeys(texts))
    if not texts:  # which tokenizers do not take
        return {}
    encoding = tokenizer(texts, **_PLAIN, return_offsets_mapping=True)
    offsets = (
        _trim_offsets(text, np.array(spans, np.int32).reshape(-1, 2))
        for text, spans in zip(texts, encoding["offset_mapping"], strict=True)
    )
    ids = _without_specials(tokenizer, encoding["input_ids"])
    return dict(zip(texts, zip(ids, offsets, strict=True), strict=True))


def _trim_offsets(text: str, offsets: np.ndarray) -> np.ndarray:
    """Excludes from each subword's offsets the white space before it."""
    starts = np.arange(len(text) + 1, dtype=np.int32)
    for space in re.finditer(r"\s+", text):
        starts[space.start() : space.end()] = space.end()
    return np.stack([np.minimum(starts[offsets[:, 0]], offsets[:, 1]), offsets[:, 1]], 1)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids that no text may have: they are replaced by the unknown token, if any.

    Unigram vocabularies, such as T5's, have names of special tokens as ordinary subwords.
    """
    if tokenizer.unk_token_id is None:
        return frozenset()
    return frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}


def _without_specials(tokenizer: Tokenizer, sequences: list[list[int]]) -> list[list[int]]:
    specials, unk_id = special_ids(tokenizer), tokenizer.unk_token_id
    if unk_id is None:  # there is no replacement
        return sequences
    return [
        ids if specials.isdisjoint(ids) else [unk_id if i in specials else i for i in ids]
        for ids in sequences
    ]


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encodes texts alone: without special tokens, and names of these stay plain text.

    Raises InputError if the tokenizer cannot, e.g. because it lacks its unknown token.
    """
    if not texts:
        return []
    try:
        sequences = tokenizer(texts, **_PLAIN)["input_ids"]
    except Exception as error:  # the Rust tokenizers raise no subclass
        reason = first_line(error)
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} cannot encode a text ({reason}); its files are "
            "damaged: download them again"
        ) from error
    return _without_specials(tokenizer, sequences)


def encode_exact(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text as it is; names of special tokens in it become these tokens."""
    return encode_all_exact(tokenizer, [text])[0]


def encode_all_exact(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encodes texts as they are, see `encode_exact`."""
    if not texts:
        return []
    options = _PLAIN | {"split_special_tokens": False}
    return tokenizer(texts, **options)["input_ids"]


def unused_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """Returns the ids of BERT's [unused1] to [unusedN]. Raises InputError if there are fewer."""
    vocab = tokenizer.get_vocab()
    names = [f"[unused{i}]" for i in range(1, count + 1)]
    if absent := [name for name in names if name not in vocab]:
        raise InputError(
            f"the vocabulary has no {absent[0]}, but {count} rows are to be initialised from such "
            "tokens; use prompt.start=words"
        )
    return [vocab[name] for name in names]
