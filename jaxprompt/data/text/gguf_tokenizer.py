"""The tokenizer of a GGUF file, made once from its metadata and cached."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprompt.data.text.gguf_header import ArrayField, Header, read_header
from jaxprompt.errors import InputError, brief
from jaxprompt.files import (
    file_checksum,
    folder_checksums,
    make_folder,
    parse_json,
    user_cache,
    write_error,
)

_SPECIAL = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"
}  # fmt: skip
# Fields that transformers' table lacks before 5.23.
_ADDED = {"ggml.add_bos_token": "add_bos_token", "ggml.add_eos_token": "add_eos_token"}
_DIGITS = "smollm"  # each digit by itself, which transformers' table lacks
# As llama.cpp: files of these pre-tokenizers, and of SentencePiece, that say nothing of it begin a
# text with the beginning-of-sequence token.
_BEGIN = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "tekken",
)
# Which split texts as GPT-2 does, as transformers does where its table lacks a pre-tokenizer.
_AS_GPT2 = (None, "default", "gpt-2", "gpt2", "olmo", "phi-2", "mpt")
_NORMALIZED = "qwen2"  # texts are put into NFC, as in Qwen2's own tokenizer.json
_MADE = 5  # counts the ways in which this module has made a tokenizer of the same metadata
_CHECKSUMS = "checksums.json"  # the CRC-32 of each file of a folder
_CURE = "use another file, or a folder with tokenizer.json"


def tokenizer_folder(path: str | os.PathLike) -> Path:
    """Returns the folder of a GGUF file's tokenizer in transformers' format, made if missing.

    It is named by a SHA-256 of the file's tokenizer metadata and transformers' version, so files
    with the same tokenizer share it. A folder with a damaged file is made again. Raises InputError
    if no tokenizer can be made of the metadata.
    """
    header = read_header(path)
    place = user_cache() / "jaxprompt" / "tokenizers"
    folder = place / _digest(header)
    if _is_whole(folder):
        return folder
    tokenizer = _make(header)
    make_folder(place)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".", dir=place))
    except OSError as error:
        raise write_error(place, error) from error
    try:
        tokenizer.save_pretrained(scratch)
        (scratch / _CHECKSUMS).write_text(json.dumps(folder_checksums(scratch)))
        if folder.is_dir() and not _is_whole(folder):
            shutil.rmtree(folder)
        try:
            # Whole or not at all: other processes may look for the folder meanwhile.
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and made the same
                raise
    except Exception as error:  # of Rust's writer too, which knows no OSError
        known = error if isinstance(error, OSError) else OSError(str(error).split("\n")[0])
        raise write_error(folder, known) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Returns whether a folder has a tokenizer whose files are unchanged."""
    try:
        checksums = parse_json((folder / _CHECKSUMS).read_bytes())
        return all(file_checksum(folder / name) == crc for name, crc in checksums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(header: Header) -> str:
    from transformers import __version__

    # The architecture too chooses how transformers makes a tokenizer.
    data = hashlib.sha256(f"{__version__} {_MADE}\n{header.architecture}\n".encode())
    for key in sorted(key for key in header.fields if key.startswith("tokenizer.")):
        data.update(header.part(*header.spans[key]))
    return data.hexdigest()


def _make(header: Header) -> Any:
    """Makes the tokenizer with transformers' converters, which need no torch."""
    from tokenizers import normalizers
    from tokenizers import pre_tokenizers as before
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if not isinstance(header.fields.get("tokenizer.ggml.tokens"), ArrayField):
        raise InputError(f"{header.path} has no tokenizer; {_CURE}")
    parts = _values(header, GGUF_TOKENIZER_MAPPING["tokenizer"])
    settings = _values(header, _ADDED | GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    pre = header.fields.get("tokenizer.ggml.pre")
    is_bytes = parts.get("tokenizer_type") == "gpt2"
    if is_bytes and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, _DIGITS):
        raise InputError(
            f"{header.path} has the pre-tokenizer tokenizer.ggml.pre={brief(pre)}, which is not "
            f"supported; {_CURE}"
        )
    if parts.get("tokenizer_type") == "llama" or pre in _BEGIN:
        settings.setdefault("add_bos_token", True)
    for name, key in _SPECIAL.items():
        settings[name] = _token(header, parts["tokens"], f"tokenizer.ggml.{key}_token_id")
    try:
        backend, more = convert_gguf_tokenizer(header.architecture, parts)
        backend = _without_later_ids(backend, len(parts["tokens"]))
        if is_bytes and pre == _NORMALIZED:
            backend.normalizer = normalizers.NFC()
        if is_bytes and pre == _DIGITS:
            steps = before.Digits(individual_digits=True), before.ByteLevel(add_prefix_space=False)
            backend.pre_tokenizer = before.Sequence(list(steps))
        front = backend.pre_tokenizer
        # transformers reads this field and does nothing with it.
        if parts.get("add_prefix_space") is False and isinstance(front, before.Metaspace):
            backend.pre_tokenizer = before.Metaspace(prepend_scheme="never", split=front.split)
        # A word of the vocabulary is one token, whatever the merges make of it.
        if is_bytes and pre in _BEGIN:
            backend.model.ignore_merges = True
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
    # The Rust tokenizers know no other kind; a vocabulary lacks scores, a merge a word.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no tokenizer can be made from {header.path} ({reason}); {_CURE}"
        ) from error


def _without_later_ids(backend: Any, size: int) -> Any:
    """Drops added tokens beyond the vocabulary, which the converters' class has by default.

    For Llama 3 that is GPT-2's end of text, whose id has no row in the embedding.
    """
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(state))


def _values(header: Header, names: Mapping[str, str]) -> dict[str, Any]:
    """Reads the fields that a file has. `names`: from its names to transformers'."""
    known = {f"tokenizer.{key}": ours for key, ours in names.items()}
    return {
        ours: header.array(key)
        if isinstance(header.fields[key], ArrayField)
        else header.fields[key]
        for key, ours in known.items()
        if key in header.fields
    }


def _token(header: Header, tokens: list[str], key: str) -> str | None:
    """Finds the text of a special token by the field with its id, None if there is none."""
    found = header.fields.get(key)
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < len(tokens):
        raise InputError(
            f"{header.path} has {key}={brief(found)}, but its vocabulary has {len(tokens):,} "
            f"tokens; {_CURE}"
        )
    return tokens[found]
