"""DPT's copies: trained vectors replace the class names in the input (Yao et al. 2022)."""

from typing import Any

import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.prompts import InitSource, Method
from jaxprompt.types import Batch, Injection, TaskInfo


class Prompt(Method):
    """Trains a vector per subword of each class name, and `length` soft tokens.

    The vectors are initialised from the subwords' embeddings. A head puts them into the input,
    after the soft tokens, which the template places.
    """

    READ_WITH = {"length": "scale"}
    task_info: TaskInfo = TaskInfo()
    length: int = kinds.option(0, "soft tokens", "at least 0")
    scale: float = kinds.option(0.02, "standard deviation of the initial soft tokens", "at least 0")

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
        return self._vectors(self.scale)

    def _subwords(self) -> list[int]:
        """Lists the subwords of each class's first word, class by class."""
        return [number for words in self.task_info.words for number in words[0]]
