"""Trained prompts in memory, and how they are loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.convert.hub import SCHEME, fetch_prompt
from jaxprompt.convert.peft import check_no_task
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import check_type
from jaxprompt.serving.adapters import ImportedPrompt, import_prompt, is_adapter


@dataclass(frozen=True, eq=False)
class Prompt:
    """The parameters of a prompt and its head, and their metadata.

    `card` is the content of prompt.json: method, backbone, task, template, scores and more. It is
    empty for an .npy array and an adapter, which have no metadata: give the task to `attach`.
    """

    tensors: Mapping[str, np.ndarray]  # prompt/slots [S, E], prompt/k [L, P, N, D], head/...
    card: Mapping[str, Any] = field(default_factory=dict)
    path: str = "the prompt"  # where it was read, for messages
    imported: ImportedPrompt | None = None  # the content of a prompt without metadata

    def __post_init__(self) -> None:
        # A copy, so that changes do not affect other prompts.
        object.__setattr__(self, "card", json.loads(json.dumps(self.card)))

    def __repr__(self) -> str:
        """Returns a one-line description."""
        parts = ", ".join(f"{name} {list(value.shape)}" for name, value in self.tensors.items())
        task = f"{self.card['method']} for {self.card['task']['name']}: " if self.card else ""
        return f"Prompt({task}{parts})"

    @property
    def metadata(self) -> PromptMetadata:
        """The metadata of `card`. Raises InputError for an invalid field."""
        return PromptMetadata.from_json(self.card, self.path)


def load_prompt(path: str | Path, *, task_id: int | None = None) -> Prompt:
    """Loads a prompt from the folder of an export or an adapter, or from an .npy array [S, E].

    The adapter is one of PEFT, or a prefix of `adapters`.

    Args:
      path: the path, or hub:owner/name[@revision] for a folder on the hub.
      task_id: the task of a PEFT adapter of MULTITASK_PROMPT_TUNING, counted from 0; it is required
        if there are several.

    Raises:
      InputError: if it is missing, truncated, or of another kind.
    """
    advice = "the path of a prompt; the result of train has its prompt as run.prompt"
    check_type("path", path, str | Path, advice)
    check_type("task_id", task_id, int | None, "the index of a task, counted from 0")
    path = str(path)
    local_path = str(fetch_prompt(path)) if path.startswith(SCHEME) else path
    if is_adapter(local_path):
        imported = import_prompt(local_path, task_id)
        return Prompt(imported.tensors, {}, path, imported)
    tensors, metadata = read_export(path)
    check_no_task(path, task_id)
    return Prompt(tensors, metadata.to_json(), path)
