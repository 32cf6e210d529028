"""Names that are suggested for an unknown one."""

import pytest

from jaxprompt.api.signatures import choice_names
from jaxprompt.errors import nearest
from jaxprompt.registry import BACKBONES

COMMANDS = ("adapt", "evaluate", "inspect", "plan", "predict", "sweep", "tasks", "train")
METHODS = tuple(choice_names("prompt"))
MANY = tuple(f"name_{i:03d}" for i in range(50))


@pytest.mark.parametrize(
    "name, choices, first",
    [
        ("fit", COMMANDS, "train"),
        ("Finetune", COMMANDS, "train"),
        ("infer", COMMANDS, "predict"),
        ("tran", COMMANDS, "train"),
        ("lora", METHODS, "prefix"),
        ("prefx", METHODS, "prefix"),
        ("robert", BACKBONES.names(), "roberta"),
    ],
)
def test_the_nearest_name_is_first(name, choices, first):
    label, _, names = nearest(name, choices).partition(": ")
    assert label == "nearest" and names.split(", ")[0] == first


@pytest.mark.parametrize("name, label, count", [("name_01", "nearest", 3), ("zzz", "known", 20)])
def test_3_names_are_listed_or_20_if_none_is_near(name, label, count):
    text = nearest(name, MANY)
    assert text.startswith(label) and text.endswith(", ... (50 in all)")
    names = text.partition(": ")[2].split(", ")[:-1]
    assert len(names) == count and set(names) < set(MANY)
