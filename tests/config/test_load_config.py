"""Values of fields: as flags have them, and as Python has them."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxprompt.config.load import apply_overrides, load_config, read_config, to_run_config
from jaxprompt.config.run import KFold, KShot, Protocol, RunConfig
from jaxprompt.errors import InputError


def read(field, value):
    config = read_config("base")
    apply_overrides(config, [(field, value)])
    return to_run_config(config).leaves()[field]


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("task.labels", "a, b", ("a", "b")),
        ("task.labels", ["a", "b, c"], ("a", "b, c")),
        ("task.labels", np.array(["a", "b"]), ("a", "b")),
        ("task.labels", list(np.array(["a", "b"])), ("a", "b")),
        ("runs.lr", np.array([0.1, 0.2]), (0.1, 0.2)),
        ("optim.lr", np.float64(0.25), 0.25),
        ("data.batch", np.int64(4), 4),
        ("optim.lr_head", None, None),
        ("train.test", False, False),
        ("data.source", Path("rows"), "rows"),
    ],
)
def test_values_of_python_are_those_of_flags(field, value, expected):
    actual = read(field, value)
    assert actual == expected and type(actual) is type(expected)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("task.labels", "('a,b')", "must be a list, e.g. a,b or"),
        ("trainable", "('prompt/.*')", "must be a list, e.g. a,b or"),
        ("task.labels", None, "task.labels=None must be a list"),
        ("task.label", None, "task.label=None must be a string"),
        ("data.batch", None, "data.batch=None must be a whole number"),
        ("task.labels", {"a", "b"}, " is a set; give a string, a number or a list"),
        ("task.words", {"a": "b"}, " is a dict; give a string, a number or a list"),
        ("task.template", "{text}\ud800", "task.template='{text}\\ud800' must be text"),
        ("task.words", ("a", "\ud800"), "task.words=('a', '\\ud800') must be a list"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(field, value, message):
    """A text in brackets would be a list of its letters, a set as it is printed one of marks."""
    with pytest.raises(InputError) as caught:
        read(field, value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides, name",
    [
        ([("task.fields", "message")], "custom"),
        ([("task.name", "topics"), ("task.fields", "message")], "topics"),
        ([("task.fields", "message"), ("task.name", "sst2")], "sst2"),
        ([("task.fields", "text"), ("task.form", "nsp")], "topics"),  # a choice of its texts
        ([("task.fields", "")], "topics"),
    ],
)
def test_columns_make_a_task_without_a_name_a_custom_one(overrides, name):
    assert load_config("base", overrides).task.name == name


@pytest.mark.parametrize("value", [{}, [{}], [["a", {"b": 1}]]])
def test_a_field_of_a_method_is_no_block(value, tmp_path):
    config = json.loads(read_config("base").to_json())
    config["prompt"]["init"] = value
    (tmp_path / "c.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"prompt.init=(?s:.*) contains a block"):
        load_config(str(tmp_path / "c.json"))


def test_an_option_in_json_is_a_name_or_a_block(tmp_path):
    config = json.loads(read_config("base").to_json())
    for value in ("kshot", {"name": "kshot"}, None):
        config["data"]["protocol"] = value
        (tmp_path / "c.json").write_text(json.dumps(config))
        assert load_config(str(tmp_path / "c.json")).data.protocol == (
            KShot() if value else Protocol()
        )
    for value in (0.5, [], {"name": {}}, "kshoot"):
        config["data"]["protocol"] = value
        (tmp_path / "c.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="data.protocol"):
            load_config(str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    "overrides, protocol",
    [
        ([("data.protocol", "kshot"), ("data.protocol.k", "4")], KShot(k=4)),
        ([("data.protocol.k", "4"), ("data.protocol.name", "kfold")], KFold(k=4)),
        ([("data.protocol", "balanced"), ("data.protocol", "")], Protocol()),
    ],
)
def test_a_block_that_is_chosen_by_name_has_the_fields_of_its_name(overrides, protocol):
    """In any order of the overrides; of several names the last counts."""
    config = load_config("base", overrides)
    assert config.data.protocol == protocol and type(config.data.protocol) is type(protocol)
    assert RunConfig.from_dict(json.loads(config.to_json())) == config


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([("data.protocol", "kshots")], "data.protocol.name='kshots'"),
        ([("data.protocol", "kshot"), ("data.protocol.n", "2")], "data.protocol.name=balanced"),
        ([("data.protocol", "kshot"), ("data.protocol.m", "2")], "'data.protocol.m'"),
    ],
)
def test_a_name_or_a_field_that_it_has_not_is_refused(overrides, message):
    with pytest.raises(InputError, match=message):
        load_config("base", overrides)
