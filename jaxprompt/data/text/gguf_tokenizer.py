"""The tokenizer of a GGUF file, made from its metadata and cached (SmolLM2's takes 2.4 s)."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprompt.data.text.gguf_header import ArrayField, Header, read_header
from jaxprompt.errors import InputError, brief
from jaxprompt.files import make_folder, user_cache, write_error

_SPECIAL = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"
}  # fmt: skip
# Fields that transformers' table lacks before 5.23.
_ADDED_FIELDS = {"ggml.add_bos_token": "add_bos_token", "ggml.add_eos_token": "add_eos_token"}
_SPLITS_DIGITS = "smollm"  # each digit by itself, which transformers' table lacks
# Like llama.cpp: files of these pre-tokenizers, and of SentencePiece, whose metadata does not say
# whether to, add the beginning-of-sequence token.
_ADDS_BOS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "tekken",
)
# Pre-tokenizers like GPT-2's, which transformers uses for those that its table lacks.
_AS_GPT2 = (None, "default", "gpt-2", "gpt2", "olmo", "phi-2", "mpt")
_NORMALIZED = "qwen2"  # texts are put into NFC, as in Qwen2's own tokenizer.json
_VERSION = 5  # of this module; raised when it makes another tokenizer of the same metadata
_ADVICE = "use another file, or a folder with tokenizer.json"


def tokenizer_folder(path: str | os.PathLike) -> Path:
    """Returns the folder of a GGUF file's tokenizer in transformers' format, made if missing.

    It is named by a SHA-256 of the file's tokenizer metadata and transformers' version, so files
    with the same tokenizer share it. Raises InputError if no tokenizer can be made of the metadata.
    """
    header = read_header(path)
    try:
        cache = user_cache() / "jaxprompt" / "tokenizers"
    except OSError as error:
        raise write_error(error.filename, error) from error
    folder = cache / _digest(header)
    if folder.is_dir():
        return folder
    tokenizer = _make(header)
    make_folder(cache)
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=cache) as scratch:
            tokenizer.save_pretrained(Path(scratch) / "tokenizer")
            # Whole or not at all: other processes may look for the folder meanwhile.
            (Path(scratch) / "tokenizer").rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster, and made the same
            raise write_error(folder, error) from error
    return folder


def _digest(header: Header) -> str:
    from transformers import __version__

    # The architecture too chooses how transformers makes a tokenizer.
    data = hashlib.sha256(f"{__version__} {_VERSION}\n{header.architecture}\n".encode())
    for key in sorted(key for key in header.fields if key.startswith("tokenizer.")):
        data.update(header.read_bytes(*header.spans[key]))
    return data.hexdigest()


def _make(header: Header) -> Any:
    """Makes the tokenizer with transformers' converters, which need no torch."""
    from tokenizers import normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if not isinstance(header.fields.get("tokenizer.ggml.tokens"), ArrayField):
        raise InputError(f"{header.path} has no tokenizer; {_ADVICE}")
    parts = _read_fields(header, GGUF_TOKENIZER_MAPPING["tokenizer"])
    settings = _read_fields(header, _ADDED_FIELDS | GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    pre = header.fields.get("tokenizer.ggml.pre")
    is_bytes = parts.get("tokenizer_type") == "gpt2"
    if is_bytes and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, _SPLITS_DIGITS):
        raise InputError(
            f"{header.path} has the pre-tokenizer tokenizer.ggml.pre={brief(pre)}, which is not "
            f"supported; {_ADVICE}"
        )
    if parts.get("tokenizer_type") == "llama" or pre in _ADDS_BOS:
        settings.setdefault("add_bos_token", True)
    for name, key in _SPECIAL.items():
        settings[name] = _special_token(header, parts["tokens"], f"tokenizer.ggml.{key}_token_id")
    try:
        backend, options = convert_gguf_tokenizer(header.architecture, parts)
        backend = _without_later_ids(backend, len(parts["tokens"]))
        if is_bytes and pre == _NORMALIZED:
            backend.normalizer = normalizers.NFC()
        if is_bytes and pre == _SPLITS_DIGITS:
            steps = (
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            )
            backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
        pre_tokenizer = backend.pre_tokenizer
        # transformers reads this field and does nothing with it.
        if parts.get("add_prefix_space") is False and isinstance(
            pre_tokenizer, pre_tokenizers.Metaspace
        ):
            backend.pre_tokenizer = pre_tokenizers.Metaspace(
                prepend_scheme="never", split=pre_tokenizer.split
            )
        # A word of the vocabulary is one token, whatever the merges make of it.
        if is_bytes and pre in _ADDS_BOS:
            backend.model.ignore_merges = True
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **options)
    # The Rust tokenizers know no other kind; a vocabulary lacks scores, a merge a word.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no tokenizer can be made from {header.path} ({reason}); {_ADVICE}"
        ) from error


def _without_later_ids(backend: Any, size: int) -> Any:
    """Drops added tokens beyond the vocabulary, which the converters' class has by default.

    For Llama 3 that is GPT-2's end of text, whose id has no row in the embedding.
    """
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(state))


def _read_fields(header: Header, names: Mapping[str, str]) -> dict[str, Any]:
    """Reads the fields that a file has. `names`: from its names to transformers'."""
    fields = {f"tokenizer.{key}": name for key, name in names.items()}
    return {
        name: header.array(key)
        if isinstance(header.fields[key], ArrayField)
        else header.fields[key]
        for key, name in fields.items()
        if key in header.fields
    }


def _special_token(header: Header, tokens: list[str], key: str) -> str | None:
    """Finds the text of a special token by the field with its id, None if there is none."""
    token_id = header.fields.get(key)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise InputError(
            f"{header.path} has {key}={brief(token_id)}, but its vocabulary has {len(tokens):,} "
            f"tokens; {_ADVICE}"
        )
    return tokens[token_id]
