"""Methods and heads as arguments of `train`: their fields, and their names."""

import pytest

import jaxprompt as jp
from jaxprompt.api.choices import Choice, as_choice


@pytest.mark.parametrize(
    "name, field, advice",
    [
        ("prefix", "num_virtual_tokens", "use length$"),
        ("prefix", "learning_rate", "use lr$"),
        ("prefix", "lenght", "nearest: length, "),
        ("linear", "poolr", "nearest: pooler, "),
    ],
)
def test_a_field_that_a_method_does_not_have_is_refused_at_once(name, field, advice):
    with pytest.raises(jp.InputError, match=f"jp.{name} has no field {field}; {advice}"):
        getattr(jp, name)(**{field: 16})


def test_a_method_or_head_can_be_given_by_its_name():
    assert as_choice("method", "soft") == Choice("prompt", "soft")
    assert as_choice("head", "verbalizer") == Choice("head", "verbalizer")
    assert as_choice("method", None) is None


@pytest.mark.parametrize(
    "argument, value",
    [("method", "lora"), ("method", "linear"), ("head", "prefix"), ("method", 16)],
)
def test_another_value_is_no_method_or_head(argument, value):
    with pytest.raises(jp.InputError, match=f"^{argument}={value!r} is "):
        as_choice(argument, value)
