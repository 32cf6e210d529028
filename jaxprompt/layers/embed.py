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

    [B, T, E], [B, T], [B|1, S, E] -> [B, T, E]

    The vectors are selected by a product with one-hot rows: its gradient is a product too and
    deterministic, unlike a scatter-add on GPUs.
    """
    pick = jax.nn.one_hot(slot, slots.shape[1], dtype=x.dtype)  # [B, T, S], zero row where slot < 0
    # Cast once they are spread: so their gradient is summed over the batch in float32.
    spread = jnp.broadcast_to(slots, (x.shape[0], *slots.shape[1:])).astype(x.dtype)
    # At a TPU's default precision float32 rows would be rounded to bfloat16.
    rows = jnp.einsum("bts,bse->bte", pick, spread, precision=jax.lax.Precision.HIGHEST)
    return jnp.where((slot >= 0)[..., None], rows, x)


def mask_absent_slots(tokens: Tokens, slots_mask) -> Tokens:
    """Masks the positions of missing slot vectors. bool [B|1, S] or None"""
    if slots_mask is None:
        return tokens
    spread = jnp.broadcast_to(slots_mask, (tokens.slot.shape[0], slots_mask.shape[-1]))
    # An index of -1 would read the last row; the next line leaves these out.
    there = jnp.take_along_axis(spread, jnp.maximum(tokens.slot, 0), axis=1)  # [B, T]
    # What is left need not stand in front.
    return tokens._replace(mask=tokens.mask & ((tokens.slot < 0) | there), lengths=None)


def output_bias(table, bias, vocab: int):
    """Returns a bias of -inf for the padding of a table, its rows from `vocab` on. [V] or None"""
    rows = len(table)
    if rows == vocab:
        return bias
    own = jnp.zeros(rows) if bias is None else bias.astype(jnp.float32)
    # With -inf a row of padding has no share of a softmax and is never the best.
    return jnp.where(jnp.arange(rows) < vocab, own, -jnp.inf)


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
        # The rows that are looked up are cast, not the whole table at every step.
        return self.table[ids].astype(self.dtype)
