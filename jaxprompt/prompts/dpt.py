"""DPT's copies: trained vectors replace the class names in the input (Yao et al. 2022)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.errors import at_least
from jaxprompt.prompts import InitSource, Method
from jaxprompt.types import Batch, Injection, Stream, TaskInfo


class Prompt(Method):
    """Trains a vector per subword of each class name, and `length` soft tokens.

    The vectors are initialised from the subwords' embeddings. A head puts them into the input,
    after the soft tokens, which the template places.
    """

    READ_WITH = {"length": "scale"}
    task_info: TaskInfo = TaskInfo()
    length: int = kinds.option(0, "soft tokens")
    scale: float = kinds.option(0.02, "standard deviation of the soft tokens at the start")

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""
        at_least("prompt.length", self.length, 0)
        at_least("prompt.scale", self.scale, 0)

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the template; the vectors come after them."""
        return self.length

    def num_rows(self) -> int:
        """Returns the number of subwords of the class names."""
        return len(self._subwords())

    def begin(self, params: dict[str, Any], source: InitSource) -> dict[str, Any]:
        """Copies the embeddings of the subwords. -> params"""
        if "rows" not in params:
            return params
        copies = np.asarray(source.embed(self._subwords()), np.float32)  # [R, E]
        return params | {"rows": copies}

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns slots [1, S + R, E], of which the template places S, and rows [R, E]."""
        # In this order: the slots of the template come first.
        counts = {"table": self.length, "rows": self.num_rows()}
        init = nn.initializers.normal(self.scale)
        vectors = {
            name: self.param(name, init, (count, self.dims.embed))
            for name, count in counts.items()
            if count
        }
        slots = jnp.concatenate(list(vectors.values()))[None] if vectors else None
        return Injection(Stream(slots=slots), rows=vectors.get("rows"))

    def _subwords(self) -> list[int]:
        """Lists the subwords of each class's first word, class by class."""
        return [number for words in self.task_info.words for number in words[0]]
