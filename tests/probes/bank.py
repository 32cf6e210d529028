"""A probe of the contract: several prompts of which each example takes one, cut for short texts."""

from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection, Role, Stream


class Prompt(Method):
    """Picks the prompt by `Batch.prompt`; a text takes no more soft tokens than it has words."""

    reads: ClassVar[tuple[str, ...]] = ("encoder", "prompt")

    length: int = 3
    size: int = 2

    def num_slots(self) -> int:
        """Tells how many soft tokens stand in the input."""
        return self.length

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """-> slots [B, S, E], slots_mask [B, S]"""
        shape = (self.size, self.length, self.dims.embed)
        table = self.param("table", nn.initializers.normal(0.5), shape)
        tokens = batch.encoder
        words = (tokens.mask & (tokens.roles == Role.TEXT)).sum(1)  # [B]
        there = jnp.arange(self.length) < words[:, None] - 2
        return Injection(Stream(slots=table[batch.prompt], slots_mask=there))
