"""Methods and heads as arguments of `train`: their fields, and their names."""

import inspect
import pydoc
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from mypy import api as mypy

import jaxprompt as jp
from configs.parts import methods
from jaxprompt.api.choices import Choice, as_choice, find_choice
from jaxprompt.api.signatures import PRESETS, choice_names
from jaxprompt.api.stub import write_stub
from jaxprompt.config.load import read_config

STUB = Path(jp.__file__).with_suffix(".pyi")


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


def test_a_learning_rate_that_is_no_number_is_refused():
    config = read_config("base")
    with config.unlocked(), pytest.raises(jp.InputError, match="optim.lr='high'"):
        jp.prefix(lr="high").fill(config)


@pytest.mark.parametrize("make", [np.int64, np.array, jnp.int32])
def test_a_scalar_is_a_number(make):
    config = read_config("base")
    with config.unlocked():
        jp.prefix(make(16)).fill(config)
    assert config.prompt.length == 16 and type(config.prompt.length) is int


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


@pytest.mark.parametrize(
    "block, name", [(block, name) for block in PRESETS for name in choice_names(block)]
)
def test_the_defaults_of_a_signature_are_those_of_the_choice(block, name):
    config = read_config("base")
    with config.unlocked():
        find_choice(name).fill(config)
    places = [config.prompt, config.head, config.optim]
    for parameter in inspect.signature(find_choice(name)).parameters.values():
        place = next(place for place in places if parameter.name in place)
        assert place[parameter.name] == parameter.default, parameter


def test_a_signature_and_its_help_are_those_of_a_function():
    signature = inspect.signature(jp.prefix)
    assert signature.bind(16, layers="1-2").arguments == {"length": 16, "layers": "1-2"}
    parameters = signature.parameters
    assert parameters["start"].annotation == Literal["normal", "zero", "text"]
    assert parameters["lr"].annotation is float and signature.return_annotation is Choice
    with pytest.raises(TypeError):
        signature.bind(16, "1-2")
    text = pydoc.plain(pydoc.render_doc(jp.prefix))
    assert methods.prefix.__doc__ in text and 'layers: layers with a prefix, e.g. "17-24"' in text
    assert "jp.prefix(length: int = 20, *, init: str = ''," in text and ") -> Choice\n" in text
    assert Choice.__doc__.startswith("A method or a head and its settings.")
    assert [*inspect.signature(Choice).parameters] == ["block", "name", "values"]


def test_a_choice_is_a_key_of_its_value():
    lengths = {jp.prefix(16): 16, jp.prefix(8): 8, jp.soft(8): 4}
    assert lengths[jp.prefix(length=8)] == 8 and len(lengths) == 3


def test_a_preset_accepts_the_fields_of_the_method_that_it_sets():
    config = read_config("base")
    with config.unlocked():
        jp.ipt_encoder(4, hidden=8).fill(config)
    prompt = config.prompt
    assert (prompt.name, prompt.length, prompt.hidden, prompt.fixed) == ("ipt", 4, 8, True)


def test_the_stub_is_current():
    """After a change: python -m jaxprompt.api.stub > jaxprompt/__init__.pyi."""
    assert STUB.read_text() == write_stub()


CALLS = """
import jaxprompt as jp
jp.prefix(16, layers="1-2", lr=0.1), jp.linear(), jp.low_rank(8, rank=2), jp.prefix
jp.prefix(length="16")
jp.prefix(start="none")
jp.prefix(16, "1-2")
jp.linear(lenght=1)
"""


def test_a_type_checker_reads_the_stub(tmp_path, monkeypatch):
    """Alone, since the types of the whole package take long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jaxprompt").mkdir()
    (tmp_path / "jaxprompt/__init__.pyi").write_text(STUB.read_text())
    (tmp_path / "calls.py").write_text(CALLS)
    flags = ["--config-file=", "--ignore-missing-imports", "--no-site-packages"]
    out, _, _ = mypy.run([*flags, "--cache-dir=cache", "calls.py"])
    lines = [int(line.split(":")[1]) for line in out.splitlines() if ": error:" in line]
    assert lines == [4, 5, 6, 7], out
