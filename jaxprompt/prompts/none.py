"""No prompt: full fine-tuning, only the head, biases or LayerNorms, or zero-shot; see trainable."""

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
