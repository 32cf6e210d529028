"""No prompt: full tuning, head or biases or LayerNorms alone, zero-shot; patterns tell which."""

from typing import ClassVar

from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection


class Prompt(Method):
    """Adds nothing."""

    TRAINABLE: ClassVar[tuple[str, ...]] = (r"head/.*",)
    LEARNS: ClassVar[bool] = False

    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns the empty injection."""
        return Injection()
