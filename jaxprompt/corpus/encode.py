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

# Characters in one call of the library, whose record of a token takes some hundred bytes.
_MAX_CALL_CHARS = 2**18


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
        self._keeps_spaces = keeps_spaces(tokenizer)
        self._settings = settings
        # Either the slow tokenizer itself is sent to the processes, or the Rust half as JSON.
        self._source: Tokenizer | str = tokenizer if backend is None else _backend_json(backend)
        self._special_ids, self._unk_id = sorted(special_ids(tokenizer)), tokenizer.unk_token_id
        self._backend: Backend | None = None
        max_id = max(tokenizer.get_vocab().values(), default=0)
        # Explicitly little-endian, so that a store can be copied to any machine.
        self.dtype = "<u2" if max_id < 2**16 else "<u4"

    def fingerprint(self) -> str:
        """Returns a value that changes with anything that the ids depend on."""
        state = self._source
        if not isinstance(state, str):
            state = json.dumps([type(state).__name__, sorted(state.get_vocab().items())])
        # The tokenizer's JSON does not contain all of them.
        state += json.dumps([self._special_ids, self._unk_id])
        return hashlib.sha256(state.encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def __call__(self, documents: list[str]) -> EncodedDocuments:
        """Encodes documents; a document without text has 0 units."""
        settings = self._settings
        units = [
            split_units(
                text,
                units=settings.units,
                paragraphs=settings.paragraphs,
                language=settings.language,
            )
            for text in documents
        ]
        texts = list(chain.from_iterable(units))
        ends = accumulate(map(len, texts))
        calls: dict[int, list[str]] = {}
        for text, end in zip(texts, ends, strict=True):
            # As many consecutive texts in one call as the bound allows.
            calls.setdefault(end // _MAX_CALL_CHARS, []).append(text)
        encoded = [self._encode(call) for call in calls.values()]
        empty = np.zeros(0, np.int64)
        return EncodedDocuments(
            np.array([len(document) for document in units], np.int64),
            np.concatenate([empty, *(lengths for lengths, _ in encoded)]),
            np.concatenate([empty.astype(self.dtype), *(ids for _, ids in encoded)]),
        )

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._keeps_spaces:
            # As after another word: "Ġthe" and the "the" at the start of a text have different ids.
            texts = [f" {text}" for text in texts]
        if isinstance(self._source, str):
            # The fast variant computes no offsets, which are not needed here.
            backend = self._load_backend(self._source)
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            ids_by_text = [encoding.ids for encoding in encodings]
        else:
            ids_by_text = encode_texts(self._source, texts)
        lengths = np.array([len(ids) for ids in ids_by_text], np.int64)
        ids = np.fromiter(chain.from_iterable(ids_by_text), self.dtype, lengths.sum())
        if self._special_ids:
            ids[np.isin(ids, self._special_ids)] = self._unk_id
        return lengths, ids

    def _load_backend(self, state: str) -> "Backend":
        if self._backend is None:
            from tokenizers import Tokenizer as Backend

            self._backend = Backend.from_str(state)
            self._backend.encode_special_tokens = True  # like any other text
        return self._backend

    def __getstate__(self):
        """Omits the backend, which each process loads itself."""
        return self.__dict__ | {"_backend": None}


def _backend_json(backend: "Backend") -> str:
    """Returns the tokenizer as JSON, without the truncation and padding of its last user."""
    state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(state, ensure_ascii=False)


# -- a process that encodes -----------------------------------------------------------------------

_encoder: TextEncoder | None = None


def start_worker(encoder: TextEncoder) -> None:
    """Prepares this process for `encode_in_worker`; it ends with the process that started it."""
    import multiprocessing
    import threading

    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this process was not started by another one")

    def exit_with_parent() -> None:
        parent.join()
        # Not sys.exit, which would end this thread alone.
        os._exit(1)

    # A killed parent cannot notify its children, and its queues stay open in the other ones.
    threading.Thread(target=exit_with_parent, daemon=True).start()


def encode_in_worker(documents: list[str]) -> EncodedDocuments:
    """Encodes documents in a process that `start_worker` prepared."""
    if _encoder is None:
        raise RuntimeError("start_worker was not called in this process")
    return _encoder(documents)
