"""A document is read as it was written, and nothing else is taken for one."""

import dataclasses
import json
import math
from collections.abc import Mapping

import pytest

from jaxprompt.config.documents import Document
from jaxprompt.errors import InputError


@dataclasses.dataclass(frozen=True)
class Part:
    size: int
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Document):
    FIX = "train again"

    name: str = ""
    step: int
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    limits: tuple[int, float] | None = None
    more: object = None
    last: bool = False


FULL = Report(
    name="a", step=3, scores={"f1": 0.5, "loss": 2}, parts={"train": Part(4, ("x", "y"))},
    limits=(1, 2.5), more={"any": [1, None]}, last=True,
)  # fmt: skip


def test_a_document_is_read_as_it_was_written():
    written = {
        "name": "a", "step": 3, "scores": {"f1": 0.5, "loss": 2},
        "parts": {"train": {"size": 4, "tags": ["x", "y"]}}, "limits": [1, 2.5],
        "more": {"any": [1, None]}, "last": True,
    }  # fmt: skip
    assert FULL.to_json() == written and list(FULL.to_json()) == list(written)
    assert Report.from_json(json.loads(json.dumps(written)), "a.json") == FULL
    # What has its default is left out, but for a field that must be there.
    assert Report(step=0).to_json() == {"step": 0}
    assert Report.from_json({"step": 0}, "a.json") == Report(step=0)


def test_numbers_that_json_lacks_are_read():
    read = Report.from_json({"step": 0, "scores": {"a": "NaN", "b": "-Infinity"}}, "a.json")
    assert math.isnan(read.scores["a"]) and read.scores["b"] == -math.inf


@pytest.mark.parametrize(
    "values, field",
    [
        ({}, "step"),
        ({"step": "3"}, "step='3'"),
        ({"step": True}, "step=True"),
        ({"step": 2**63}, f"step={2**63} "),
        ({"step": -(10**5000)}, "step=a int too long"),
        ({"step": 1.0}, "step=1.0"),
        ({"step": 1, "steps": 2}, "'steps'"),
        ({"step": 1, "name": None}, "name=None"),
        ({"step": 1, "last": 0}, "last=0"),
        ({"step": 1, "scores": [1]}, "scores="),
        ({"step": 1, "scores": {"f1": "high"}}, "scores.f1='high'"),
        ({"step": 1, "parts": {"dev": 3}}, "parts.dev=3"),
        ({"step": 1, "parts": {"dev": {}}}, "parts.dev.size"),
        ({"step": 1, "parts": {"dev": {"size": 1, "sum": 2}}}, "'parts.dev.sum'"),
        ({"step": 1, "parts": {"dev": {"size": 1, "tags": ["x", 3]}}}, "parts.dev.tags.1=3"),
        ({"step": 1, "limits": [1]}, "limits="),
        ({"step": 1, "limits": "12"}, "limits="),
    ],
)
def test_a_field_that_is_wrong_is_named_with_its_file(values, field):
    with pytest.raises(InputError) as error:
        Report.from_json(values, "runs/a.json")
    message = str(error.value)
    assert message.startswith("runs/a.json: ") and field in message
    assert message.endswith("; train again") and "\n" not in message
