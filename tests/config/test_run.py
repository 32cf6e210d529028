"""What a field of a config is declared by: its default, its checks, its help and its JSON."""

import dataclasses
import json

import pytest

from jaxprompt.config import kinds
from jaxprompt.config.load import load_config, read_config, with_overrides
from jaxprompt.config.reference import list_fields, write_page
from jaxprompt.config.run import (
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
