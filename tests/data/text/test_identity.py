"""Fingerprints of what a prompt depends on besides the weights."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.text.identity import check_fingerprints, scorer_fingerprints
from jaxprompt.errors import InputError


@dataclass(frozen=True)
class Config:
    layers: int = 2


def digests(tokenizer, **columns):
    backbone = SimpleNamespace(cfg=Config())
    task = custom_task(**{"fields": []} | columns)
    model = SimpleNamespace(backbone=backbone)
    return scorer_fingerprints(SimpleNamespace(tokenizer=tokenizer, model=model, task=task))


def test_conversations_depend_on_the_chat_template(bert):
    tokenizer = copy.copy(bert)
    recorded = []
    for template in ("{{ messages[0].content }}", "{{ messages[0].content }} ."):
        tokenizer.chat_template = template
        recorded.append(digests(tokenizer, messages=["messages"]))
        assert "chat_template" not in digests(tokenizer, fields=["text"], target="answer")
    check_fingerprints(recorded[0], recorded[0], "the prompt was trained with", "advice")
    check_fingerprints({}, recorded[0], "an older export has none, and was trained with", "advice")
    with pytest.raises(InputError, match="^it was trained with another chat template .*; advice$"):
        check_fingerprints(*recorded, "it was trained with", "advice")
