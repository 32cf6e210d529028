"""A conversation as the field MESSAGES of an example has it."""

import json
from typing import Any, NamedTuple

MESSAGES = "messages"  # name of the field in templates


class Conversation(NamedTuple):
    """Messages in OpenAI's format, of which those of the assistant may be learned."""

    messages: list[dict[str, Any]]  # "role", "content" and what else OpenAI's format has
    trained: list[int]  # indices of the assistant's messages that are learned
    tools: list[Any]  # descriptions of functions

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Returns it in JSON."""
        return json.dumps(self._asdict(), ensure_ascii=False, default=str)

    @property
    def is_answered(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"
