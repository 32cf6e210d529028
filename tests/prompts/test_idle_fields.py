"""Fields of methods and heads that another field makes idle: each is named, and no other is."""

import dataclasses

import pytest

from jaxprompt.build.notes import ineffective_field_notes
from jaxprompt.config.load import load_config
from jaxprompt.registry import HEADS, METHODS

CLASSES = [
    *map(METHODS.load, METHODS.names()),
    *map(HEADS.load, HEADS.names()),
]
CLASSES = [cls for cls in CLASSES if cls.READ_WITH]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__module__)
def test_it_names_fields_of_its_own(cls):
    fields = {field.name for field in dataclasses.fields(cls)}
    for need, names in cls.READ_WITH.items():
        assert {need.partition("=")[0], *names.split()} <= fields


@pytest.mark.parametrize(
    "config_fields, message",
    [
        ({"name": "soft", "start": "vocab", "scale": 0.5, "top": 9},
         ["prompt.scale=0.5 has no effect: prompt.start is vocab"]),
        ({"name": "soft", "start": "normal", "scale": 0.5, "top": 9},
         ["prompt.top=9 has no effect: prompt.start is normal"]),
        ({"name": "soft", "start": "uniform"}, []),
        ({"name": "prefix", "start": "zero", "scale": 0.5},
         ["prompt.scale=0.5 has no effect: prompt.start is zero"]),
        ({"name": "p_tuning", "encoder": "mlp", "lstm_layers": 1, "inner": 8},
         ["prompt.lstm_layers=1 has no effect: prompt.encoder is mlp"]),
        ({"name": "p_tuning", "encoder": "none", "hidden": 4, "inner": 8},
         ["prompt.hidden=4 has no effect: prompt.encoder is none",
          "prompt.inner=8 has no effect: prompt.encoder is none"]),
        ({"name": "p_tuning", "hidden": 4, "lstm_layers": 1, "linear": 1, "inner": 8}, []),
        ({"name": "dart", "hide": 0.5, "fluency": 0.0},
         ["prompt.hide=0.5 has no effect: prompt.fluency is 0.0"]),
        ({"name": "dart", "hide": 0.5, "fluency": 1.0}, []),
        ({"name": "dpt", "scale": 1.0}, ["prompt.scale=1.0 has no effect: prompt.length is 0"]),
        ({"name": "ipt", "coefficient": 1.0},
         ["prompt.coefficient=1.0 has no effect: prompt.on is prompt"]),
        ({"name": "ipt", "coefficient": 1.0, "layers": "2", "on": "prefix"}, []),
        ({"name": "compose", "parts": "soft(start=vocab,scale=0.5)+prefix(scale=0.5)"},
         ["prompt.scale=0.5 has no effect: prompt.start is vocab"]),
        ({"name": "spans", "threshold": 1.0},
         ["head.threshold=1.0 has no effect: head.no_answer is False"]),
        ({"name": "spans", "threshold": 1.0, "no_answer": True}, []),
        ({"name": "discriminator", "order_seed": 3},
         ["head.order_seed=3 has no effect: head.order is task"]),
        ({"name": "discriminator", "order_seed": 3, "order": "random"}, []),
    ],
)  # fmt: skip
def test_a_field_that_nothing_reads_is_told(config_fields, message):
    block = "head" if config_fields["name"] in HEADS.names() else "prompt"
    config = load_config(
        "base", [(f"{block}.{name}", str(value)) for name, value in config_fields.items()]
    )
    assert getattr(config, block).name == config_fields["name"]
    assert ineffective_field_notes(config) == message


def test_a_grid_of_starts_may_read_it():
    fields = {"prompt.name": "soft", "prompt.top": "9", "runs.prompt_starts": "normal,vocab"}
    assert ineffective_field_notes(load_config("base", list(fields.items()))) == []
