"""The metadata of an export, which tests change."""

import copy
from typing import Any

from jaxprompt.convert.prompt_metadata import PromptMetadata

VALUES: dict[str, Any] = {
    "method": "prefix",
    "hyper": {"name": "prefix", "length": 4},
    "prompt": {"name": "constant"},
    "head": {"name": "linear"},
    "backbone": {
        "id": "owner/bert", "revision": "", "family": "bert", "sentinel": "<extra_id_{}>",
        "rescale": 1.0, "quantize": "none", "fingerprint": "53aa51172d142c89d9012cce15ae4d6c",
        "dims": {
            "vocab": 53, "width": 16, "embed": 16, "layers": 2, "heads": 2, "head_dim": 8,
            "max_len": 40, "decoder_layers": 0,
        },
    },
    "task": {
        "name": "news", "fields": ["text"], "labels": ["où", "何"], "metric": "accuracy",
        "splits": {}, "derive": {"text": ["column", {"a": "b"}]}, "limits": [],
    },
    "template": "{text} It was [mask].",
    "label_words": [["bad", "awful"], ["good"]],
    "layout": {
        "max_len": 32, "max_target": 8, "multiple": 8, "padding_side": "right", "choices": 1,
        "form": "cloze", "answer": "", "eos": True,
    },
    "generate": {
        "max_new_tokens": 64, "num_beams": 1, "length_penalty": 1.0, "early_stopping": "false",
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n": 1,
        "repetition_penalty": 1.0, "stop": [], "seed": 0, "logprobs": False,
    },
    "metrics": {"dev": {"accuracy": 0.1 + 0.2}, "test": None},
    "seed": 13,
    "versions": {"python": "3.11"},
    "created": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


def metadata_json(**changes: Any) -> dict[str, Any]:
    """Returns metadata as prompt.json holds them; blocks are changed field by field."""
    blocks = {
        name: VALUES[name] | value
        for name, value in changes.items()
        if isinstance(value, dict) and isinstance(VALUES.get(name), dict)
    }
    return copy.deepcopy(VALUES | changes | blocks)


def make_metadata(**changes: Any) -> PromptMetadata:
    """Returns metadata, changed as by `metadata_json`."""
    return PromptMetadata.from_json(metadata_json(**changes), "export")
