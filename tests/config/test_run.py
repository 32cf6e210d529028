"""What a field of a config is declared by: its default, its checks, its help and its JSON."""

import dataclasses
import json

import pytest

from jaxprompt.config import kinds
from jaxprompt.config.load import (
    load_config,
    override_generation,
    read_config,
    with_overrides,
)
from jaxprompt.config.reference import list_fields, write_page
from jaxprompt.config.run import (
    GenerateConfig,
    HoldOut,
    OptimConfig,
    Protocol,
    RunConfig,
    WarmupLinear,
)
from jaxprompt.errors import InputError


@dataclasses.dataclass(frozen=True)
class WithNoise(OptimConfig):
    noise: float = kinds.share(0.25, "of the gradients' standard deviation")


def test_a_field_is_declared_in_one_place(monkeypatch):
    """Its default, its flag, its checks, the help and docs/config.md come from there."""
    declared = {**RunConfig.declared(), "optim": WithNoise}
    monkeypatch.setattr(RunConfig, "declared", classmethod(lambda cls: declared))
    assert read_config("base").optim.noise == 0.25
    assert load_config("base", [("optim.noise", "0.5")]).optim.noise == 0.5
    with pytest.raises(InputError, match=r"optim\.noise=1\.5 must be in \[0, 1\)"):
        load_config("base", [("optim.noise", "1.5")])
    with pytest.raises(InputError, match=r"optim\.nois'; nearest: optim\.noise"):
        load_config("base", [("optim.nois", "0.5")])
    monkeypatch.setenv("COLUMNS", "200")
    help_line = "number, in [0, 1); of the gradients' standard deviation"
    assert any("optim.noise = 0.25" in x and help_line in x for x in list_fields().splitlines())
    assert "| `optim.noise` | `0.25` | number, in [0, 1) |" in write_page()


def test_json_that_predates_a_field_has_its_default(tmp_path):
    config = load_config("base", [("optim.lr", "0.5")])
    values = json.loads(config.to_json())
    del values["optim"]["clip"], values["generate"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config(str(tmp_path / "config.json")) == config
    values["optim"]["clips"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"unknown config field 'optim\.clips'"):
        load_config(str(tmp_path / "config.json"))


def test_a_choice_has_the_fields_of_its_option_alone():
    config = load_config("base", [("data.protocol", "kshot"), ("data.protocol.k", "4")])
    overrides = [("data.protocol.size", "9"), ("data.protocol.name", "holdout")]
    assert with_overrides(config, overrides).data.protocol == HoldOut(size=9)
    assert config.replace({"data.protocol": ""}).data.protocol == Protocol()
    warm = {"optim.schedule": "warmup_linear", "optim.schedule.warmup_steps": 3}
    assert config.replace(warm).optim.schedule == WarmupLinear(warmup_steps=3)


def test_a_config_is_never_modified():
    config = load_config("base")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0
    changed = config.replace({"optim.lr": 1.0, "task.words": ["a", "b"]})
    assert (changed.optim.lr, changed.task.words) == (1.0, ("a", "b"))
    assert config == load_config("base")
    assert with_overrides(changed, []) == changed


GENERATE = {
    "temperature": ({"temperature": -1.0}, r"generate\.temperature=-1\.0 must be at least 0"),
    "denormal": ({"temperature": 1e-40}, r"generate\.temperature=1e-40 is too small to divide by"),
    "no nucleus": ({"temperature": 1.0, "top_p": 0.0}, r"generate\.top_p=0\.0 must be in \(0, 1\]"),
    "over 1": ({"temperature": 1.0, "top_p": 1.5}, r"generate\.top_p=1\.5 must be in \(0, 1\]"),
    "an empty stop": ({"stop": ["a", ""]}, r"generate\.stop=\('a', ''\) has an empty string"),
    "beams": ({"num_beams": 2, "temperature": 1.0}, "excludes generate.temperature=1.0"),
    "stopped beams": ({"num_beams": 2, "stop": ["a"]}, r"excludes generate\.stop=\('a',\)"),
    "greedy samples": ({"n": 4}, r"generate\.n=4 needs samples"),
    "greedy nucleus": ({"top_p": 0.9}, r"generate\.top_p=0\.9 needs samples"),
}


@pytest.mark.parametrize("case", GENERATE)
def test_what_cannot_be_generated(case):
    values, message = GENERATE[case]
    with pytest.raises(InputError, match=message) as error:
        GenerateConfig.from_dict(values, "generate.")
    assert "\n" not in str(error.value)


def test_fields_of_generation_are_changed_as_flags():
    overrides = [("generate.temperature", "0.5"), ("generate.stop", "('\\n', 'Q, A')")]
    changed = override_generation(GenerateConfig(max_new_tokens=9), overrides)
    assert changed == GenerateConfig(max_new_tokens=9, temperature=0.5, stop=("\n", "Q, A"))
    with pytest.raises(InputError, match=r"generate\.stop='\\n' must be a list"):
        override_generation(changed, [("generate.stop", "\n")])
    with pytest.raises(InputError, match=r"unknown config field 'generate\.temprature'"):
        override_generation(changed, [("generate.temprature", "1")])
