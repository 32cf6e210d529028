"""A method or a head that is named brings its own fields; configs are found by name anywhere."""

import inspect
import subprocess
import sys

import pytest
from test_configs import RUNNABLE
from tiny_run import ROOT

from jaxprompt.build.check import check_config
from jaxprompt.config.blocks import make_preset_block, option_fields
from jaxprompt.config.files import load_module, shipped_configs
from jaxprompt.config.load import load_config, read_config
from jaxprompt.config.open_blocks import block_names, declared_fields
from jaxprompt.config.synonyms import SYNONYMS
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.registry import HEADS, METHODS
from jaxprompt.runs.restore import is_zero_shot

SOFT = {"name", "init", "length", "decoder", "start", "scale", "top", "text", "file"}


def read(config="base", **fields):
    """Loads a config by name; fields as in optim__lr=1, in this order."""
    changes = [(name.replace("__", "."), str(value)) for name, value in fields.items()]
    return load_config(config, changes)


# -- methods --------------------------------------------------------------------------------------


def test_a_named_method_brings_its_block_whatever_the_order():
    first = read(prompt__name="soft", prompt__length=5)
    then = read(prompt__length=5, prompt__name="soft")
    assert set(first.prompt.to_dict()) == SOFT
    assert first.prompt.get("length") == 5 and first == then
    assert first.optim.lr == read().optim.lr  # a field sets nothing beside its block
    values = read_config("base", [("prompt.name", "soft")])
    assert values.is_locked and values.prompt.is_locked
    back = load_config("base:soft", [("prompt.name", "prefix"), ("prompt.layers", "1-2")])
    assert set(back.prompt.fields) == set(read().prompt.fields)
    assert back.prompt.get("layers") == "1-2"
    assert read(prompt__name="none").prompt.to_dict() == {"name": "none"}
    for config in (first, back, read(prompt__name="none")):
        check_config(config)


def test_the_method_that_is_there_keeps_its_settings():
    assert read("quickstart", prompt__name="prefix").prompt.get("length") == 16


def test_blocks_have_all_that_a_method_has():
    assert block_names("prompt") == METHODS.names()
    base = read_config("base")
    for name in block_names("prompt"):
        assert set(make_preset_block("prompt", name, base)) == {
            "name",
            *declared_fields("prompt", name),
        }
        assert ("init" in declared_fields("prompt", name)) == bool(declared_fields("prompt", name))
    assert set(base.prompt) == {"name", *declared_fields("prompt", "prefix")}


@pytest.mark.parametrize(
    "fields, parts",
    [
        (dict(prompt__name="soft", prompt__layers="1-2"),
         ["'prompt.layers'", "prompt.name=ipt or prefix; "]),
        (dict(prompt__top=5), ["prompt.top", "prompt.name=soft; "]),
        (dict(prompt__length=3, prompt__name="none"), ["name=none has the fields: none"]),
        (dict(prompt__name="sotf"), ["unknown method prompt.name='sotf'; nearest: soft"]),
        (dict(prompt__name="soft", prompt__lenght=3), ["'prompt.lenght'; nearest: prompt.length"]),
        (dict(head__name="verbalizer", head__pooler="cls"),
         ["'head.pooler'", "head.name=linear or regression; "]),
        (dict(head__span="target"), ["with head.name=verbalizer; "]),
        (dict(head__name="text", head__dropout=0), ["head.name=text has the fields: none"]),
    ],
)  # fmt: skip
def test_fields_of_others_are_refused_by_name(fields, parts):
    with pytest.raises(InputError) as caught:
        read(**fields)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_heads_own_what_their_block_has():
    assert block_names("head") == HEADS.names()
    base = read_config("base")
    for name in HEADS.names():
        block = make_preset_block("head", name, base)
        assert block.to_dict() == make_head(**block.to_dict()).block()
    config = read(head__span="target", head__name="verbalizer", head__scores="full")
    assert config.head.name == "verbalizer"
    assert (config.head.get("span"), config.head.get("scores")) == ("target", "full")


def test_zero_shot_is_one_command():
    """The fields say the same as the argument of base.py, but for what trains."""
    fields = [("prompt.name", "none"), ("head.name", "verbalizer")]
    by_fields, by_argument = load_config("base", fields), load_config("base:zero_shot")
    assert is_zero_shot(by_argument) and not by_argument.trainable
    assert (by_fields.prompt, by_fields.head) == (by_argument.prompt, by_argument.head)


@pytest.mark.parametrize(
    ("head", "is_known"), [("verbalizer", True), ("text", True), ("linear", False)]
)
def test_heads_without_parameters_need_no_training(head, is_known):
    """A linear layer that nothing trained answers nothing."""
    assert is_zero_shot(load_config("base:zero_shot", [("head.name", head)])) == is_known


# -- arguments and names --------------------------------------------------------------------------


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_an_unknown_argument_names_the_known(path):
    takes = inspect.signature(load_module(str(path)).get_config).parameters
    words = "known: |nearest: " if takes else "takes no argument.*':sfot'"
    with pytest.raises(InputError, match=words) as caught:
        load_config(f"{path}:sfot")
    assert "Error" not in str(caught.value)


def test_an_argument_of_base_is_a_method():
    assert load_config("base:soft").prompt.name == "soft"
    assert load_config("base:soft").optim.lr == 3e-2
    assert load_config("base:") == load_config("base")
    for name in ("accuracy:trec-prefix-17", "accuracy:sst2-head", "accuracy:trecc-prefix"):
        with pytest.raises(InputError, match="TASK-METHOD-16|known: |nearest: "):
            load_config(name)


def test_shipped_configs_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"base", "quickstart", "ppt/nsp", "adapt/mlm"} <= set(shipped_configs())
    assert not any(name.startswith("parts") for name in shipped_configs())
    names = ("quickstart:prefix", "quickstart.py:prefix", "configs/quickstart.py:prefix")
    configs = [load_config(name) for name in (*names, f"{ROOT}/configs/quickstart.py")]
    assert all(c == configs[0] for c in configs)
    file = tmp_path / "configs" / "quickstart.py"  # a file comes before what ships
    file.parent.mkdir()
    file.write_text("from configs.base import get_config as base\n\ndef get_config():\n"
                   "    c = base()\n    c.seed = 7\n    return c\n")  # fmt: skip
    assert load_config("configs/quickstart.py").seed == 7
    with pytest.raises(InputError, match="'quikstart' is not a file.*nearest: quickstart"):
        load_config("quikstart:prefix")


def test_reading_a_config_starts_no_devices():
    """`plan` has yet to tell JAX how many there are."""
    code = "import jax\nfrom jaxprompt.cli.plan import simulate\n"
    code += "from jaxprompt.config.load import load_config\n"
    code += "load_config('base', [('prompt.name', 'soft')])\nsimulate(13)\n"
    code += "assert jax.device_count() == 13"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# -- names from elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, meant",
    [
        ("optim.learning_rate", "optim.lr"),
        ("batch_size", "data.batch"),
        ("optim.lr-scheduler", "optim.schedule.name"),
        ("attention_probs_dropout_prob", "backbone.attention_dropout"),
        ("train.lr", "optim.lr, runs.lr"),
        ("runs.seed", "runs.seeds, data.seed, generate.seed, seed"),  # the same block first
        ("backbone.once", "backbone.cache_shared_prefix"),
        ("data.protocol.scarce", "data.protocol.on_shortage"),
    ],
)
def test_usual_names_suggest_ours(field, meant):
    with pytest.raises(InputError) as caught:
        load_config("base", [(field, "1")])
    assert str(caught.value) == f"unknown config field {field!r}; nearest: {meant}"


def test_synonyms_mean_fields_that_are_there_and_hide_none():
    fields = {*read().leaves(), *option_fields()}
    assert set(SYNONYMS.values()) <= fields
    assert not set(SYNONYMS) & fields


def test_a_total_that_is_given_takes_the_place_of_the_configs_own():
    """Of two totals that are given neither does."""
    totals = lambda *fields: [
        getattr(load_config("base", [(f"train.{name}", text) for name, text in fields]).train, name)
        for name in ("total_steps", "total_epochs", "total_examples")
    ]
    assert totals() == [0, 10.0, 0]
    assert totals(("total_steps", "7")) == [7, 0.0, 0]
    assert totals(("total_examples", "640")) == [0, 0.0, 640]
    assert totals(("total_steps", "7"), ("total_epochs", "2")) == [7, 2.0, 0]
    assert totals(("total_steps", "0")) == [0, 10.0, 0]
    assert totals(("total_epochs", "0.0")) == [0, 0.0, 0]
    assert totals(("total_steps", "7"), ("total_steps", "8")) == [8, 0.0, 0]
