"""Token ids of documents, unit by unit, from a tokenizer's Rust backend alone."""

import hashlib
import json
import os
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxprompt.corpus.read import TextSettings
from jaxprompt.corpus.split import split_units
from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts, keeps_spaces, special_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_AT_ONCE = 2**18  # characters; the library's record of a token takes some hundred bytes


class EncodedDocuments(NamedTuple):
    """Several documents, concatenated."""

    units: np.ndarray  # [documents] how many
    lengths: np.ndarray  # [units] in tokens
    ids: np.ndarray  # [tokens]


class TextEncoder:
    """Splits documents into units and encodes each as it occurs after other units.

    That is with a leading space, if a tokenizer keeps spaces. No special tokens are added, and
    their names in the text stay plain text. Can be sent to other processes, which then need
    transformers only for a tokenizer without a Rust backend.
    """

    def __init__(self, tokenizer: Tokenizer, settings: TextSettings):
        """Copies what it needs of `tokenizer`, which stays unchanged."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._space = keeps_spaces(tokenizer)
        self._settings = settings
        # Either the slow tokenizer itself is sent to the processes, or the Rust half as JSON.
        self._source: Tokenizer | str = tokenizer if backend is None else _state(backend)
        self._specials, self._unknown = sorted(special_ids(tokenizer)), tokenizer.unk_token_id
        self._backend: Backend | None = None
        highest = max(tokenizer.get_vocab().values(), default=0)
        # Little-endian in name, so that a store can be copied to any machine.
        self.dtype = "<u2" if highest < 2**16 else "<u4"

    def fingerprint(self) -> str:
        """Returns a value that changes with anything that the ids depend on."""
        state = self._source
        if not isinstance(state, str):
            state = json.dumps([type(state).__name__, sorted(state.get_vocab().items())])
        state += json.dumps([self._specials, self._unknown])  # not all of the tokenizer's JSON
        return hashlib.sha256(state.encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def __call__(self, documents: list[str]) -> EncodedDocuments:
        """Encodes documents; a document without text has 0 units."""
        at = self._settings
        units = [
            split_units(text, units=at.units, paragraphs=at.paragraphs, language=at.language)
            for text in documents
        ]
        texts = list(chain.from_iterable(units))
        sizes = accumulate(map(len, texts))
        groups: dict[int, list[str]] = {}
        for text, size in zip(texts, sizes, strict=True):
            # By the running size: as many texts together as the bound allows, in their order.
            groups.setdefault(size // _AT_ONCE, []).append(text)
        parts = [self._encode(group) for group in groups.values()]
        none = np.zeros(0, np.int64)
        return EncodedDocuments(
            np.array([len(own) for own in units], np.int64),
            np.concatenate([none, *(lengths for lengths, _ in parts)]),
            np.concatenate([none.astype(self.dtype), *(ids for _, ids in parts)]),
        )

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._space:
            # As behind another word: "Ġthe" has another id than the "the" that begins a text.
            texts = [f" {text}" for text in texts]
        if isinstance(self._source, str):
            # It computes no offsets, which nobody reads here.
            encodings = self._load(self._source).encode_batch_fast(texts, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
        else:
            ids = encode_texts(self._source, texts)
        lengths = np.array([len(own) for own in ids], np.int64)
        found = np.fromiter(chain.from_iterable(ids), self.dtype, lengths.sum())
        if self._specials:
            found[np.isin(found, self._specials)] = self._unknown
        return lengths, found

    def _load(self, state: str) -> "Backend":
        if self._backend is None:
            from tokenizers import Tokenizer as Backend

            self._backend = Backend.from_str(state)
            self._backend.encode_special_tokens = True  # as any other text
        return self._backend

    def __getstate__(self):
        """Leaves out what each process makes for itself."""
        return self.__dict__ | {"_backend": None}


def _state(backend: "Backend") -> str:
    """The tokenizer as JSON, without the truncation and padding of whoever used it last."""
    state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(state, ensure_ascii=False)


# -- a process that encodes -----------------------------------------------------------------------

_encoder: TextEncoder | None = None


def start_worker(encoder: TextEncoder) -> None:
    """Prepares this process for `encode_here`; it ends with the process that started it."""
    import multiprocessing
    import threading

    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this process was not started by another one")

    def follow() -> None:
        parent.join()
        # Not sys.exit, which would end this thread alone.
        os._exit(1)

    # A parent that was killed cannot say so, and its queues stay open in its other children.
    threading.Thread(target=follow, daemon=True).start()


def encode_here(documents: list[str]) -> EncodedDocuments:
    """Encodes documents in a process that `start_worker` prepared."""
    if _encoder is None:
        raise RuntimeError("start_worker has not made this process ready")
    return _encoder(documents)
