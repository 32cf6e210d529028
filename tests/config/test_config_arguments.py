"""The argument of a config file, such as `rte,prefix`."""

import pytest

from jaxprompt.config.load import read_argument
from jaxprompt.errors import InputError

PARTS = {"TASK": ("rte", ("rte", "boolq")), "SYSTEM": ("prefix", ("prefix", "soft"))}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["rte", "prefix"]),
        ("boolq", ["boolq", "prefix"]),
        (",soft", ["rte", "soft"]),
        ("boolq,soft", ["boolq", "soft"]),
    ],
)
def test_parts_that_are_left_out_have_their_default(text, parts):
    assert read_argument(text, **PARTS) == parts


@pytest.mark.parametrize(
    ("text", "value"),
    [("boolq,soft,3", "TASK,SYSTEM"), ("boolqq", "nearest: boolq"), ("rte,sof", "nearest: soft")],
)
def test_other_parts_are_refused(text, value):
    with pytest.raises(InputError, match=value):
        read_argument(text, **PARTS)
