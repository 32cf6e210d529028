"""Word embeddings with soft slots written over them."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.quantized import as_table
from jaxprompt.layers.stack import declare_param
from jaxprompt.types import Tokens

EMBED_INIT = nn.initializers.normal(0.02)


def write_slots(x, slot, slots):
    """Writes slot vector slot[b, t] wherever slot >= 0.

    [B, T, E], [B, T], [B|1, S, E] or None -> [B, T, E]

    The vectors are selected by a product with one-hot rows: its gradient is a product too and
    deterministic, unlike a scatter-add on GPUs.
    """
    if slots is None:
        return x
    # [B, T, S], a zero row where slot < 0
    one_hot = jax.nn.one_hot(slot, slots.shape[1], dtype=x.dtype)
    # Cast after the broadcast, so that the gradient is summed over the batch in float32.
    vectors = jnp.broadcast_to(slots, (x.shape[0], *slots.shape[1:])).astype(x.dtype)
    # At a TPU's default precision float32 rows would be rounded to bfloat16.
    written = jnp.einsum("bts,bse->bte", one_hot, vectors, precision=jax.lax.Precision.HIGHEST)
    return jnp.where((slot >= 0)[..., None], written, x)


def mask_absent_slots(tokens: Tokens, slots_mask) -> Tokens:
    """Masks the positions of missing slot vectors. bool [B|1, S] or None"""
    if slots_mask is None:
        return tokens
    slots_present = jnp.broadcast_to(slots_mask, (tokens.slot.shape[0], slots_mask.shape[-1]))
    # An index of -1 would read the last row; the result ignores these.
    is_present = jnp.take_along_axis(slots_present, jnp.maximum(tokens.slot, 0), axis=1)  # [B, T]
    # Without lengths: the remaining tokens need not come first.
    return tokens._replace(mask=tokens.mask & ((tokens.slot < 0) | is_present), lengths=None)


def output_bias(table, bias, vocab: int):
    """Returns a bias of -inf for the padding of a table, its rows from `vocab` on. [V] or None"""
    rows = len(table)
    if rows == vocab:
        return bias
    unpadded = jnp.zeros(rows) if bias is None else bias.astype(jnp.float32)
    # With -inf a row of padding has probability 0 and is never the best.
    return jnp.where(jnp.arange(rows) < vocab, unpadded, -jnp.inf)


class Table(nn.Module):
    """A lookup table, which may be quantised. int [...] -> [..., E]"""

    rows: int
    width: int
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        """Declares the table."""
        init = functools.partial(EMBED_INIT, shape=(self.rows, self.width))
        self.table = as_table(declare_param(self, "table", init), self.dtype)

    def __call__(self, ids):
        """Looks rows up."""
        # Casts the rows that are looked up, not the whole table at every step.
        return self.table[ids].astype(self.dtype)
