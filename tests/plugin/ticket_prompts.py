"""Soft tokens of low rank, and classes by cosine similarity."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.heads import BackboneInfo, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.reading import Scores
from jaxprompt.prompts import Method
from jaxprompt.scoring.losses import make_loss
from jaxprompt.types import Batch, Injection, Objective, Stream


class LowRank(Method):
    """Soft tokens whose table is the product of two small matrices."""

    length: int = kinds.option(20, "soft tokens", "at least 1")
    rank: int = kinds.option(4, "of their table", "at least 1")

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the input."""
        return self.length

    def is_computed(self) -> bool:
        """Returns whether folding saves work: here the product."""
        return True

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns slots [1, S, E], the same for every example."""
        normal = nn.initializers.normal(0.5)
        rows = self.param("rows", normal, (self.length, self.rank))  # [S, R]
        basis = self.param("basis", normal, (self.rank, self.dims.embed))  # [R, E]
        return Injection(Stream(slots=(rows @ basis)[None]))


@dataclasses.dataclass(frozen=True)
class Cosine(Kind):
    """Classes by the cosine similarity of [CLS] and a trained vector of each class."""

    scale: float = kinds.option(10.0, "of the similarities")

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Any) -> HeadLayout:
        """Reads [CLS], or the end of a left-to-right model's input."""
        module = CosineScores(len(setup.task.labels), self.scale)
        return HeadLayout(self, {"main": module}, self.specials(facts, setup, tokenizer))

    def objectives(self, smoothing: float) -> list[Objective]:
        """Makes the cross entropy of the classes."""
        return [Objective("main", make_loss("restricted", smoothing))]


class CosineScores(Scores):
    """Scores the classes. [B, T, H] -> float32 [B, C]"""

    classes: int
    scale: float

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores the state that is read."""
        state = self.state(hidden, batch).astype(jnp.float32)  # [B, H]
        shape = (self.classes, state.shape[-1])
        classes = self.param("classes", nn.initializers.normal(1.0), shape)  # [C, H]
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return self.scale * unit(state) @ unit(classes).T
