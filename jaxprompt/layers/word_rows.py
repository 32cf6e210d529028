"""A trained vector per word of the vocabulary; only those of words in the data are stored."""

import base64
import binascii
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.errors import InputError
from jaxprompt.tree import Params

# The number of rows is rounded up to it, so that a mesh can shard them; exports have no padding.
_MULTIPLE = 64


def hash_vectors(ids, width: int, scale: float, xp=jnp):
    """Returns a fixed random vector in U(-scale, scale) per word. int [...] -> [..., width]

    It depends only on the id and the width, not on library versions or a seed, so the vector of a
    word that was never trained need not be stored. The mixing is MurmurHash3's finaliser.
    """
    first_index = xp.asarray(ids).astype(xp.uint32)[..., None] * xp.uint32(width)
    # The finaliser maps 0 to 0: without a constant, here 2^32 / golden ratio, the first value of
    # word 0 would be -scale.
    x = first_index + xp.arange(width, dtype=xp.uint32) + xp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * xp.uint32(factor)
    # The upper 24 bits, which a float32 holds exactly.
    unit = ((x ^ (x >> 16)) >> 8).astype(xp.float32) * xp.float32(2.0**-24)  # [0, 1)
    return (2.0 * unit - 1.0) * xp.float32(scale)


def pack_ids(ids: np.ndarray) -> str:
    """Encodes a set of token ids as a short string, for a config or an export. int [ids]"""
    is_member = np.zeros(int(np.max(ids, initial=-1)) + 1, bool)
    is_member[ids] = True
    return base64.b64encode(zlib.compress(np.packbits(is_member).tobytes(), 9)).decode()


def unpack_ids(text: str) -> np.ndarray:
    """Decodes the string of `pack_ids`. -> int64 [ids], ascending. Raises InputError."""
    try:
        # An export may come from anyone: the output is limited to the largest vocabulary.
        packed = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 1 << 20)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise InputError(
            f"the token ids {text[:20]!r}... cannot be read ({error}); export the prompt again"
        ) from error
    return np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8)))


@functools.cache
def row_indices(seen: str, vocab: int) -> np.ndarray:
    """Returns the stored row of each word, -1 = none. `seen` "" = every word. -> int32 [V]"""
    if not seen:
        return np.arange(vocab, dtype=np.int32)
    rows = np.full(vocab, -1, np.int32)
    ids = unpack_ids(seen)
    if ids.max(initial=-1) >= vocab:
        raise InputError(
            f"the prompt has vectors of words beyond the {vocab} of this backbone; use the "
            "backbone that it was trained on"
        )
    rows[ids] = np.arange(len(ids))
    return rows


class WordRows(nn.Module):
    """Looks up the vectors of words. int [...] -> float32 [..., width]

    Parameters: `table` [R, width], the trained vectors of the words `seen`, unless `fixed`, and
    `base` [V, width], if present, the vectors of all others; R and V are rounded up. Without `base`
    the others are `hash_vectors`. The vector of a word that is not in the training text has no
    gradient, so plain SGD, or Adam without weight decay, trains `table` exactly like the same rows
    of a table of all V.
    """

    vocab: int
    width: int
    scale: float
    seen: str = ""
    fixed: bool = False
    has_base: bool = False

    @nn.compact
    def __call__(self, ids):
        """Looks up vectors."""
        row_by_word, rows = row_indices(self.seen, self.vocab), None
        if self.has_base:
            shape = _padded_size(self.vocab), self.width
            base = self.param("base", nn.initializers.zeros, shape)
            rows = base[ids].astype(jnp.float32)
        if not self.fixed:
            shape = _padded_size(self.stored()), self.width
            table = self.param("table", self._draw, shape)  # [R, width]
            if not self.seen:
                return table[ids]
        if rows is None:
            rows = hash_vectors(ids, self.width, self.scale)
        if self.fixed:
            return rows
        row = jnp.asarray(row_by_word)[ids]
        # An index of -1 would read the last row, which the result ignores.
        return jnp.where((row >= 0)[..., None], table[jnp.maximum(row, 0)], rows)

    @nn.nowrap
    def stored(self) -> int:
        """Returns the number of trained rows, without the padding rows."""
        # At least one, so that there is an array to train.
        return max(int(row_indices(self.seen, self.vocab).max() + 1), 1)

    def _draw(self, key, shape):
        return jax.random.uniform(key, shape, jnp.float32, -self.scale, self.scale)


class _HasTable(Protocol):
    def table(self) -> WordRows: ...


def full_table(
    rows: WordRows, path: str, method: _HasTable, prompt: Mapping[str, Any]
) -> np.ndarray:
    """Returns the vectors of all words that another prompt has. -> float32 [V, width]

    `method` is its method and `prompt` its parameters, read from `path`.

    Raises:
      InputError: if its vectors have another vocabulary or width.
    """
    other, params = method.table(), prompt.get("words", {})
    if (other.vocab, other.width) != (rows.vocab, rows.width):
        raise InputError(
            f"prompt.pretrained={path} has vectors of size {other.width} for {other.vocab} words, "
            f"but this prompt needs {rows.width} for {rows.vocab}; use an export that was trained "
            "on this backbone"
        )
    if "base" in params:
        vectors = np.array(params["base"], np.float32)[: other.vocab]
    else:
        vectors = hash_vectors(np.arange(other.vocab), other.width, other.scale, np)
    if "table" in params:
        row_by_word = row_indices(other.seen, other.vocab)
        is_stored = row_by_word >= 0
        vectors[is_stored] = np.asarray(params["table"], np.float32)[row_by_word[is_stored]]
    return vectors


def init_table(
    rows: WordRows, path: str, params: dict[str, Any], method: _HasTable, prompt: Mapping[str, Any]
) -> dict[str, Any]:
    """Initialises the stored vectors from those of another prompt, see `full_table`. -> params"""
    vectors = full_table(rows, path, method, prompt)
    initialized = {"base": _pad_rows(vectors)} if rows.has_base else {}
    if "table" in params:
        row_by_word = row_indices(rows.seen, rows.vocab)
        table = np.array(params["table"], np.float32)
        table[row_by_word[row_by_word >= 0]] = vectors[row_by_word >= 0]
        initialized["table"] = table
    return initialized


def export_rows(rows: WordRows, params: Params) -> dict[str, Any]:
    """Removes the padding rows from a method's parameters. -> params"""
    sizes = _unpadded_sizes(rows)
    unpadded = {name: x[: sizes[name]] for name, x in params.get("words", {}).items()}
    return {**params, **({"words": unpadded} if unpadded else {})}


def restore_rows(
    rows: WordRows,
    path: str,
    params: Params,
    load: Callable[[str], tuple[_HasTable, Mapping[str, Any]]],
) -> dict[str, Any]:
    """Undoes `export_rows`, and adds the vectors of all words in the export `path`. -> params"""
    base = {"base": full_table(rows, path, *load(path))} if rows.has_base else {}
    # Exported parameters replace those of the other prompt.
    sizes, padded = _unpadded_sizes(rows), base | params.get("words", {})
    # Arrays of another size stay as they are; the comparison of shapes rejects them.
    has_size = {name: np.shape(x)[:1] == (sizes.get(name),) for name, x in padded.items()}
    padded = {name: _pad_rows(np.asarray(x)) if has_size[name] else x for name, x in padded.items()}
    return {**params, **({"words": padded} if padded else {})}


def _unpadded_sizes(rows: WordRows) -> dict[str, int]:
    return {"table": rows.stored(), "base": rows.vocab}


def _padded_size(rows: int) -> int:
    return -(-rows // _MULTIPLE) * _MULTIPLE


def _pad_rows(rows: np.ndarray) -> np.ndarray:
    padding = _padded_size(len(rows)) - len(rows)
    return np.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
