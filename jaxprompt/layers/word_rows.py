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

# The number of rows is rounded up to it, so that a mesh can shard them; exports have no such rows.
_MULTIPLE = 64


def hash_vectors(ids, width: int, scale: float, xp=jnp):
    """Returns a fixed random vector in U(-scale, scale) per word. int [...] -> [..., width]

    It depends only on the id and the width, not on library versions or a seed, so the vector of a
    word that was never trained need not be stored. The mixing is MurmurHash3's finaliser.
    """
    at = xp.asarray(ids).astype(xp.uint32)[..., None] * xp.uint32(width)
    # The finaliser maps 0 to 0: without a constant, here 2^32 / golden ratio, the first number of
    # word 0 would be -scale.
    x = at + xp.arange(width, dtype=xp.uint32) + xp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * xp.uint32(factor)
    # The upper 24 bits, which a float32 holds exactly.
    unit = ((x ^ (x >> 16)) >> 8).astype(xp.float32) * xp.float32(2.0**-24)  # [0, 1)
    return (2.0 * unit - 1.0) * xp.float32(scale)


def pack_ids(ids: np.ndarray) -> str:
    """Encodes a set of token ids as a short string, for a config or an export. int [ids]"""
    marks = np.zeros(int(np.max(ids, initial=-1)) + 1, bool)
    marks[ids] = True
    return base64.b64encode(zlib.compress(np.packbits(marks).tobytes(), 9)).decode()


def unpack_ids(text: str) -> np.ndarray:
    """Decodes the string of `pack_ids`. -> int64 [ids], ascending. Raises InputError."""
    try:
        # An export may come from anyone: no more is unpacked than the largest vocabulary has.
        marks = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 1 << 20)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise InputError(
            f"the token ids {text[:20]!r}... cannot be read ({error}); export the prompt again"
        ) from error
    return np.flatnonzero(np.unpackbits(np.frombuffer(marks, np.uint8)))


@functools.cache
def row_indices(seen: str, vocab: int) -> np.ndarray:
    """Returns the stored row of each word, -1 = none. `seen` "" = every word. -> int32 [V]"""
    if not seen:
        return np.arange(vocab, dtype=np.int32)
    number = np.full(vocab, -1, np.int32)
    ids = unpack_ids(seen)
    if ids.max(initial=-1) >= vocab:
        raise InputError(
            f"the prompt has vectors of words beyond the {vocab} of this backbone; use the "
            "backbone that it was trained on"
        )
    number[ids] = np.arange(len(ids))
    return number


class WordRows(nn.Module):
    """Looks up the vectors of words. int [...] -> float32 [..., width]

    Parameters: `table` [R, width], the trained vectors of the words `seen`, unless `fixed`, and
    `base` [V, width], if present, the vectors of all others; R and V are rounded up. Without `base`
    the others are `hash_vectors`. A vector of a word that is not in the training text has no gradient,
    so plain SGD, or Adam without weight decay, trains `table` exactly like the same rows of a table
    of all V.
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
        number, rows = row_indices(self.seen, self.vocab), None
        if self.has_base:
            shape = _rounded(self.vocab), self.width
            base = self.param("base", nn.initializers.zeros, shape)
            rows = base[ids].astype(jnp.float32)
        if not self.fixed:
            shape = _rounded(self.stored()), self.width
            own = self.param("table", self._draw, shape)  # [R, width]
            if not self.seen:
                return own[ids]
        if rows is None:
            rows = hash_vectors(ids, self.width, self.scale)
        if self.fixed:
            return rows
        at = jnp.asarray(number)[ids]
        # An index of -1 would read the last row, which the choice leaves out anyway.
        return jnp.where((at >= 0)[..., None], own[jnp.maximum(at, 0)], rows)

    @nn.nowrap
    def stored(self) -> int:
        """Returns the number of trained rows, without the padding rows."""
        # A text without a known word still needs an array to train.
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
    other, numbers = method.table(), prompt.get("words", {})
    if (other.vocab, other.width) != (rows.vocab, rows.width):
        raise InputError(
            f"prompt.pretrained={path} has vectors of size {other.width} for {other.vocab} words, "
            f"but this prompt needs {rows.width} for {rows.vocab}; use an export that was trained "
            "on this backbone"
        )
    if "base" in numbers:
        found = np.array(numbers["base"], np.float32)[: other.vocab]
    else:
        found = hash_vectors(np.arange(other.vocab), other.width, other.scale, np)
    if "table" in numbers:
        number = row_indices(other.seen, other.vocab)
        found[number >= 0] = np.asarray(numbers["table"], np.float32)[number[number >= 0]]
    return found


def init_table(
    rows: WordRows, path: str, params: dict[str, Any], method: _HasTable, prompt: Mapping[str, Any]
) -> dict[str, Any]:
    """Initialises the stored vectors from those of another prompt, see `full_table`. -> params"""
    base = full_table(rows, path, method, prompt)
    found = {"base": _pad(base)} if rows.has_base else {}
    if "table" in params:
        number, table = row_indices(rows.seen, rows.vocab), np.array(params["table"], np.float32)
        table[number[number >= 0]] = base[number >= 0]
        found["table"] = table
    return found


def export_rows(rows: WordRows, params: Params) -> dict[str, Any]:
    """Removes the padding rows from a method's parameters. -> params"""
    sizes = _sizes(rows)
    own = {name: x[: sizes[name]] for name, x in params.get("words", {}).items()}
    return {**params, **({"words": own} if own else {})}


def restore_rows(
    rows: WordRows,
    path: str,
    params: Params,
    take: Callable[[str], tuple[_HasTable, Mapping[str, Any]]],
) -> dict[str, Any]:
    """Undoes `export_rows`, and adds the vectors of all words in the export `path`. -> params"""
    base = {"base": full_table(rows, path, *take(path))} if rows.has_base else {}
    # What was exported goes before what is taken.
    sizes, own = _sizes(rows), base | params.get("words", {})
    # Of another number they are left as they are, and refused where shapes are compared.
    fits = {name: np.shape(x)[:1] == (sizes.get(name),) for name, x in own.items()}
    own = {name: _pad(np.asarray(x)) if fits[name] else x for name, x in own.items()}
    return {**params, **({"words": own} if own else {})}


def _sizes(rows: WordRows) -> dict[str, int]:
    return {"table": rows.stored(), "base": rows.vocab}


def _rounded(rows: int) -> int:
    return -(-rows // _MULTIPLE) * _MULTIPLE


def _pad(rows: np.ndarray) -> np.ndarray:
    more = _rounded(len(rows)) - len(rows)
    return np.pad(rows, [(0, more)] + [(0, 0)] * (rows.ndim - 1))
