"""An exported prompt: the constants that a trained method folds to."""

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection, Prefix, Stream


class Prompt(Method):
    """Holds `slots` rows and a prefix of `length` in the layers `first` to `last` (half-open)."""

    slots: int = 0
    first: int = 0
    last: int = 0
    shift: int = 0

    def num_slots(self) -> int:
        """Tells how many soft tokens stand in the input."""
        return self.slots

    def position_shift(self) -> int:
        """Tells by how much the text's positions move."""
        return self.shift

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns the constants. -> slots [1, S, E], k, v [L, 1, P, N, D]"""
        d, zeros = self.dims, nn.initializers.zeros
        rows = prefix = None
        if self.slots:
            rows = self.param("slots", zeros, (self.slots, d.embed))[None]
        if self.length:
            shape = (self.last - self.first, self.length, d.heads, d.head_dim)
            pad = [(self.first, d.layers - self.last), (0, 0), (0, 0), (0, 0)]
            k, v = (jnp.pad(self.param(name, zeros, shape), pad)[:, None] for name in ("k", "v"))
            inside = (jnp.arange(d.layers) >= self.first) & (jnp.arange(d.layers) < self.last)
            mask = jnp.broadcast_to(inside[:, None, None], (d.layers, 1, self.length))
            prefix = Prefix(k, v, mask)
        return Injection(encoder=Stream(rows, prefix))
