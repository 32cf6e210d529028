"""A probe of the contract: a row for every label, which an objective of its own learns."""

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.reading import Scores, select_positions
from jaxprompt.prompts import Method
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.types import Batch, Injection, Objective, Role, Stream, TaskInfo


class LabelRows(Scores):
    """Scores each class by its row. [B, T, H] -> [B, C]"""

    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Reads the first of the read positions."""
        features = backbone.lm_features(select_positions(hidden, batch.label_pos))[:, 0]  # [B, E]
        return jnp.einsum("be,re->br", features, injection.rows)


class Prompt(Method):
    """Soft tokens, and label rows that a view of its own lays into the text."""

    task_info: TaskInfo = TaskInfo()
    length: int = 3

    def num_slots(self) -> int:
        """Tells how many soft tokens stand in the input."""
        return self.length

    def modules(self) -> dict[str, nn.Module]:
        """Makes what scores label rows."""
        return {"labels": LabelRows()}

    def objectives(self) -> list[Objective]:
        """Learns the rows with the right one in the place of a word."""
        return [Objective("labels", cross_entropy, head="labels", weight=0.5, view=self._view)]

    def _view(self, batch: Batch, key) -> Batch:
        tokens = batch.encoder
        text = (tokens.roles == Role.TEXT) & tokens.mask
        first = text & (text.cumsum(1) == 1)  # [B, T]
        slot = jnp.where(first, self.length + batch.labels[:, None], tokens.slot)
        return batch._replace(encoder=tokens._replace(slot=slot))

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """-> slots [1, S + C, E], of which the template places S; rows [C, E]"""
        draw = lambda name, rows: self.param(
            name, nn.initializers.normal(0.5), (rows, self.dims.embed)
        )
        table, rows = draw("table", self.length), draw("labels", self.task_info.classes)
        return Injection(Stream(slots=jnp.concatenate([table, rows])[None]), rows=rows)
