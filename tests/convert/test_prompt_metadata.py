"""What prompt.json holds is read as it was written, and every field of it is checked."""

import json

import pytest
from exports import make_metadata, metadata_json

from jaxprompt.config.run import GenerateConfig
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError

ORIGIN = {
    "path": "runs/a", "method": "soft", "task": "news", "seed": 1, "metrics": {"dev": None},
    "created": "now", "sha256": "abc",
}  # fmt: skip
DEMOS = {
    "per_class": 1, "total": 0, "exact": 0, "samples": 2, "similar": 1.0, "encoder": "",
    "max_demo_tokens": 0, "max_example_tokens": 0, "seed": 5, "fingerprint": "",
    "examples": [{"fields": {"text": "a"}, "label": 1}],
}  # fmt: skip
OPTIONAL = {
    "demos": DEMOS, "init": ORIGIN | {"init": ORIGIN, "more": [ORIGIN]},
    "pretrained": {"task": "nsp", "options": [2, 3]}, "step": 7, "sha256": "abc",
}  # fmt: skip


def through_json(values):
    return json.loads(json.dumps(values))


@pytest.mark.parametrize("optional", [{}, OPTIONAL])
def test_what_is_written_is_read_again_in_the_same_order(optional):
    metadata = make_metadata(**optional)
    values = through_json(metadata.to_json())
    assert PromptMetadata.from_json(values, "export") == metadata
    expected = metadata_json(**optional)
    del values["task"], expected["task"]  # of which all fields are written
    assert json.dumps(values) == json.dumps(expected)


def test_a_task_of_every_kind_of_field_is_the_same_again():
    for name in ("sst2", "copa", "tacred", "conll2003"):
        metadata = make_metadata(task=through_json(vars(get_task(name))))
        assert metadata.task == get_task(name)


def test_blocks_are_typed_and_absent_fields_have_their_defaults():
    metadata = make_metadata(generate={"max_new_tokens": 5})
    assert metadata.generate == GenerateConfig(max_new_tokens=5)
    assert metadata.prompt.name == "constant" and metadata.hyper.get("length") == 4
    assert metadata.label_words == (("bad", "awful"), ("good",))
    read = PromptMetadata.from_json(metadata_json(unknown=1), "export")
    assert read.step is None and "unknown" not in read.to_json()


@pytest.mark.parametrize(
    "field, value",
    [
        ("method", 1), ("hyper", "prefix"), ("prompt", {}), ("head.name", None), ("seed", True),
        ("backbone", []), ("backbone.rescale", 0), ("backbone.quantize", "int2"),
        ("backbone.fingerprint", None), ("backbone.dims.depth", 1),
        ("backbone.dims.width", "16"), ("task.fields", "text"), ("task.labels", [1]),
        ("task.derive", {"a": ["b"]}), ("task.spaced", 1), ("template", None),
        ("label_words", [["a"], "b"]), ("layout.max_len", 0), ("layout.side", "top"),
        ("layout.max_length", 5), ("generate.num_beams", 0), ("metrics.dev", 0.5), ("versions", []),
        ("created", 5), ("step", "7"), ("pretrained", []), ("sha256", 1), ("init", {}),
        ("init.more", [{}]), ("init.init.seed", "1"), ("demos", {}), ("demos.samples", 0),
        ("demos.examples", [{"fields": {}}]),
        ("task.labels", ["one"]), ("task.words", [["a"], []]),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_named(field, value):
    values = metadata_json(**OPTIONAL)
    *blocks, last = field.split(".")
    inner = values
    for block in blocks:
        inner = inner[block]
    inner[last] = value
    with pytest.raises(InputError, match="export the prompt again") as error:
        PromptMetadata.from_json(values, "runs/a/export")
    message = str(error.value)
    assert message.startswith("runs/a/export: ") and "\n" not in message
    assert field.split(".")[0] in message


@pytest.mark.parametrize("field", [*metadata_json(), "backbone.dims", "layout.eos", "task.name"])
def test_a_field_that_is_missing_is_named(field):
    values = metadata_json()
    *blocks, last = field.split(".")
    del (values[blocks[0]] if blocks else values)[last]
    with pytest.raises(InputError, match=f"export: the field {field} is missing; export the"):
        PromptMetadata.from_json(values, "export")
