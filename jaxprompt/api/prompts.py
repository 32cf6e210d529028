"""A learned prompt in memory: read from files, written to files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.convert.hub import SCHEME, fetch_prompt
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import check_type
from jaxprompt.serving.adapters import Adopted, adopt, is_adapter


@dataclass(frozen=True, eq=False)
class Prompt:
    """The numbers of a prompt and its head, and the metadata that say what they belong to.

    `card` holds the method, the backbone, the task, the template, the scores and more, as
    prompt.json does. It is empty for an .npy array and a PEFT adapter, which say none of it:
    `attach` is told the task.
    """

    tensors: Mapping[str, np.ndarray]  # prompt/slots [S, E], prompt/k [L, P, N, D], head/...
    card: Mapping[str, Any] = field(default_factory=dict)
    path: str = "the prompt"  # where it was read, for messages
    adopted: Adopted | None = None  # what is known of one without metadata

    def __post_init__(self) -> None:
        # Whoever changes it changes no other prompt.
        object.__setattr__(self, "card", json.loads(json.dumps(self.card)))

    def __repr__(self) -> str:
        """Says what it is in one line."""
        parts = ", ".join(f"{name} {list(x.shape)}" for name, x in self.tensors.items())
        of = f"{self.card['method']} for {self.card['task']['name']}: " if self.card else ""
        return f"Prompt({of}{parts})"

    @property
    def metadata(self) -> PromptMetadata:
        """What `card` holds, checked. Raises InputError for a field that is not as written."""
        return PromptMetadata.from_json(self.card, self.path)


def load_prompt(path: str | Path) -> Prompt:
    """Reads a prompt: the folder of an export or of a PEFT adapter, or an .npy array [S, E].

    Such a folder may be on the hub, hub:owner/name[@revision]. Raises InputError for one that is
    missing, cut, or of another kind.
    """
    cure = "the place of a prompt; what train gives has it already, as run.prompt"
    check_type("path", path, str | Path, cure)
    path = str(path)
    where = str(fetch_prompt(path)) if path.startswith(SCHEME) else path
    if is_adapter(where):
        adopted = adopt(where)
        return Prompt(adopted.tensors, {}, path, adopted)
    tensors, metadata = read_export(path)
    return Prompt(tensors, metadata.to_json(), path)
