"""Fingerprints of a tokenizer and of a backbone's config, besides the weights."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError

# Fields that a run sets or that follow from the weights, which have a fingerprint of their own.
_RUNTIME_FIELDS = frozenset(
    "attention attention_dropout decodes dropout dtype embed_dropout model_heads remat rescale "
    "rows skip stack tied".split()
)
_NAMES = {
    "tokenizer": "tokenizer", "layers": "config.json", "chat_template": "chat template",
}  # fmt: skip
_PROBE = ("The quick (brown) fox isn't 1,234.5 foxes!", " two  spaces\n", "naïve ÄÖÜ 中文 emoji 🙂")


def scorer_fingerprints(scorer: Any) -> dict[str, str]:
    """Returns the fingerprints of a scorer's tokenizer and backbone, see `fingerprints`.

    For a task of conversations also that of the chat template, which writes them.
    """
    digests = fingerprints(scorer.tokenizer, scorer.model.backbone.cfg)
    if scorer.task.messages:
        template = scorer.tokenizer.get_chat_template()  # jinja ignores a line break at its end
        digests["chat_template"] = _digest(template.removesuffix("\n"))
    return digests


def fingerprints(tokenizer: Tokenizer, cfg: Any) -> dict[str, str]:
    """Returns fingerprints of the tokenizer's ids and of what the layers of a config compute."""
    fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    config = {name: value for name, value in fields.items() if name not in _RUNTIME_FIELDS}
    return {"tokenizer": _tokenizer_digest(tokenizer), "layers": _digest(config)}


@functools.lru_cache(maxsize=4)
def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    # Not a digest of its files, because the same tokenizer can be saved in several ways.
    words = sorted(tokenizer.get_vocab().items())
    return _digest([words, [tokenizer.encode(text, add_special_tokens=False) for text in _PROBE]])


def _normalized(value: Any) -> Any:
    """Sorts sets and rounds floats, which differ between processes and machines."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return {name: _normalized(part) for name, part in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_normalized(part) for part in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> str:
    text = json.dumps(_normalized(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def check_ids(rows: Iterable[Sequence[Encoded]], vocab: int, tokenizer: Tokenizer) -> None:
    """Raises InputError for a token id that has no row in the embedding."""
    parts = [part for row in rows for part in row]
    decoders = [part.decoder.ids for part in parts if part.decoder is not None]
    targets = [part.targets for part in parts if part.targets is not None]
    ids = (*(part.ids for part in parts), *decoders, *targets)
    check_id(max((int(x.max(initial=0)) for x in ids), default=0), vocab, tokenizer)


def check_id(highest: int, vocab: int, tokenizer: Tokenizer) -> None:
    """Raises InputError if the highest token id has no row in the embedding."""
    if highest >= vocab:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise InputError(
            f"the tokenizer gives {token!r} the id {highest}, but the embedding has only {vocab} "
            "rows; use the tokenizer that belongs to the weights"
        )


def check_fingerprints(
    recorded: Mapping[str, Any], current: Mapping[str, Any], subject: str, advice: str
) -> None:
    """Raises InputError if a recorded fingerprint differs from the current one."""
    for name, label in _NAMES.items():
        if name in recorded and name in current and recorded[name] != current[name]:
            raise InputError(
                f"{subject} another {label} for these weights ({str(recorded[name])[:12]}, now "
                f"{current[name][:12]}); {advice}"
            )
