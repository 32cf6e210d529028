"""A probe of the contract: soft tokens computed from each text, and no field of a decoder."""

from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection, Role, Stream


class Prompt(Method):
    """Adds the mean word embedding of a text, through a dense layer, to trained rows."""

    reads: ClassVar[tuple[str, ...]] = ("encoder",)

    length: int = 3

    def num_slots(self) -> int:
        """Tells how many soft tokens stand in the input."""
        return self.length

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """-> slots [B, S, E]"""
        table = self.param("table", nn.initializers.normal(0.5), (self.length, self.dims.embed))
        tokens = batch.encoder
        real = (tokens.mask & (tokens.roles == Role.TEXT))[..., None]  # [B, T, 1]
        mean = jnp.where(real, embed[tokens.ids], 0).sum(1) / jnp.maximum(real.sum(1), 1)
        moved = nn.Dense(self.dims.embed, name="dense")(mean.astype(jnp.float32))  # [B, E]
        return Injection(Stream(slots=table + moved[:, None]))
