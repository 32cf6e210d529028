"""What packages bring by entry points: names, errors that name them, what they cannot break."""

import sys

import pytest
from tiny import CONFIGS

import jaxprompt as jp
from jaxprompt import registry
from jaxprompt.api.choices import find_choice
from jaxprompt.api.signatures import choice_names
from jaxprompt.backbones import families, make_backbone
from jaxprompt.build.prompt_artifact import check_plugins, plugins_of
from jaxprompt.config import reference
from jaxprompt.config.load import load_config
from jaxprompt.config.open_blocks import block_names
from jaxprompt.convert import shapes
from jaxprompt.convert.names.tables import FAMILIES
from jaxprompt.data.tasks.registry import TASKS, get_task
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head, make_text_head
from jaxprompt.prompts import make_prompt
from jaxprompt.prompts.soft import Prompt as Soft
from jaxprompt.registry import BACKBONES, HEADS, METHODS, Plugin
from jaxprompt.types import Dims

DIMS = Dims(**dict.fromkeys(Dims._fields, 2))
METHOD = """
from __future__ import annotations
from jaxprompt.config import kinds
from jaxprompt.prompts import soft

class Inner(soft.Prompt):
    '''Soft tokens of another package.'''
    gain: float = kinds.option(0.5, "of the rows")
"""
BACKBONE = """
'''CamemBERT: RoBERTa under another name.'''
from jaxprompt.backbones.roberta import Backbone, make_config
from jaxprompt.convert.names.tables import FAMILIES
FAMILY = FAMILIES["roberta"]
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package of one module on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(module: str, text: str, points: dict[str, dict[str, str]], version: str = "1.0"):
        (tmp_path / f"{module}.py").write_text(text)
        folder = tmp_path / f"{module}-{version}.dist-info"
        folder.mkdir()
        name = module.replace("_", "-")
        folder.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        lines = []
        for group, entries in points.items():
            lines.append(f"[jaxprompt.{group}]")
            lines += [f"{key} = {value}" for key, value in entries.items()]
        folder.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        registry.entry_points.cache_clear()

    yield write
    registry.entry_points.cache_clear()


@pytest.fixture
def inner(install):
    """A package whose method is a class of another name than its entry point."""
    install("inner_pack", METHOD, {"prompts": {"inner": "inner_pack:Inner"}}, "2.1")


def test_a_method_is_made_by_the_name_of_its_entry_point(inner):
    assert (
        "inner" in METHODS.names()
        and "inner" in block_names("prompt")
        and "inner" in choice_names("prompt")
    )
    assert METHODS.plugin("inner") == Plugin("inner-pack", "2.1")
    method = make_prompt("inner", DIMS, length=3, gain=0.25)
    block = method.block()
    assert (block["name"], block["length"], block["gain"]) == ("inner", 3, 0.25)
    assert make_prompt(**block, dims=DIMS) == method
    whole = make_prompt("compose", DIMS, parts="inner(length=2)+soft(length=1)")
    assert whole.num_slots() == 3
    assert plugins_of(method, make_head("linear"), "bert") == {"inner-pack": "2.1"}
    assert plugins_of(whole, make_head("linear"), "bert") == {"inner-pack": "2.1"}
    assert load_config("base", [("prompt.name", "inner")]).prompt.get("gain") == 0.5
    assert jp.Choice("prompt", "inner") == find_choice("inner")
    assert "prompt, with prompt.name=inner\n" in reference.list_fields()


def test_what_jaxprompt_has_is_of_no_package():
    soft = make_prompt("soft", DIMS, length=2)
    assert METHODS.plugin("soft") is None and METHODS.name_of(Soft) == "soft"
    assert plugins_of(soft, make_head("linear"), "bert") == {}
    assert METHODS.built_in() == METHODS.names() and "soft" in METHODS.names()
    assert HEADS.load("linear").__module__ == "jaxprompt.heads.linear"
    assert make_text_head().name == "text"


def test_a_class_of_jaxprompt_keeps_its_name_whatever_a_package_calls_it(install):
    install("alias_pack", "", {"prompts": {"aaa": "jaxprompt.prompts.soft:Prompt"}})
    assert make_prompt("soft", DIMS, length=2).block()["name"] == "soft"


@pytest.mark.parametrize(
    "group, kind, name",
    [("prompts", METHODS, "soft"), ("heads", HEADS, "linear"), ("backbones", BACKBONES, "bert"),
     ("tasks", TASKS, "sst2")],
)  # fmt: skip
def test_no_package_replaces_what_jaxprompt_has(group, kind, name, install):
    install("taker", METHOD, {group: {name: "taker:Inner"}})
    with pytest.raises(InputError) as caught:
        kind.load(name)
    assert "taker 1.0" in str(caught.value) and repr(name) in str(caught.value)
    assert name not in kind.loadable() and kind.plugin(name) is None


def test_no_two_packages_bring_one_name(inner, install):
    install("other_pack", METHOD, {"prompts": {"inner": "other_pack:Inner"}})
    with pytest.raises(InputError) as caught:
        METHODS.load("inner")
    assert "inner-pack 2.1" in str(caught.value) and "other-pack 1.0" in str(caught.value)


BROKEN = {
    "import": ("import nowhere_at_all", "ModuleNotFoundError"),
    "attribute": ("x = 1", "AttributeError"),
    "syntax": ("def", "SyntaxError"),
    "raises": ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
    "no class": ("Thing = 1", "jaxprompt."),
    "another class": ("class Thing: pass", "jaxprompt."),
}


@pytest.mark.parametrize("text, reason", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("group, kind", [("prompts", METHODS), ("heads", HEADS)])
def test_an_error_of_a_package_is_one_line_that_names_it(text, reason, group, kind, install):
    install("bad_pack", text, {group: {"bad": "bad_pack:Thing"}})
    with pytest.raises(InputError) as caught:
        kind.load("bad")
    message = str(caught.value)
    assert "bad-pack 1.0" in message and reason in message and "\n" not in message


def test_a_broken_package_breaks_nothing_else(install):
    points = {group: {"bad": "bad_pack:Thing"} for group in ("prompts", "heads", "tasks")}
    install("bad_pack", "import nowhere_at_all", points | {"backbones": {"bad": "bad_pack"}})
    assert load_config("base").prompt.name == "prefix"
    assert make_prompt("soft", DIMS, length=2).num_slots() == 2
    with pytest.raises(InputError, match="prompt.name=p_tuning"):  # says whose the field is
        load_config("base", [("prompt.lstm_layers", "1")])
    with pytest.raises(InputError, match="label_rows or linear") as caught:  # those that fit
        make_head("tags").check_task(get_task("sst2"))
    assert "bad" not in str(caught.value)
    shown = reference.list_fields()
    assert "prompt, with prompt.name=bad: unusable: the package bad-pack 1.0" in shown
    assert "head, with head.name=bad: unusable: the package bad-pack 1.0" in shown
    assert "bad" in families() and get_task("sst2").name == "sst2"


# -- tasks and backbones --------------------------------------------------------------------------


def test_a_task_is_a_dict_of_fields(install):
    text = "GOOD = {'fields': ('text',), 'labels': ('a', 'b'), 'plain': '{text}'}\n"
    text += "ODD = GOOD | {'colour': 1}\nNONE = ()"
    entries = {"good_task": "pack:GOOD", "odd_task": "pack:ODD", "no_task": "pack:NONE"}
    install("pack", text, {"tasks": entries})
    assert get_task("good_task").labels == ("a", "b")
    for name, reason in (("odd_task", "colour"), ("no_task", "a dict of fields")):
        with pytest.raises(InputError, match=reason) as caught:
            get_task(name)
        assert "pack 1.0" in str(caught.value) and repr(name) in str(caught.value)


def test_a_backbone_is_a_module_with_its_table_of_names(install):
    install("camembert_pack", BACKBONE, {"backbones": {"camembert": "camembert_pack"}})
    assert "camembert" in families()
    assert shapes.get_family("camembert") is FAMILIES["roberta"]
    module = make_backbone("camembert", CONFIGS["roberta"], ("mlm",))
    assert module == make_backbone("roberta", CONFIGS["roberta"], ("mlm",))
    soft = make_prompt("soft", DIMS, length=2)
    assert plugins_of(soft, make_head("linear"), "camembert") == {"camembert-pack": "1.0"}


def test_a_backbone_without_that_table_is_refused(install):
    install("bare_pack", "FAMILY = 1", {"backbones": {"bare": "bare_pack"}})
    with pytest.raises(InputError, match="bare-pack 1.0.*FAMILY"):
        shapes.get_family("bare")


# -- exports --------------------------------------------------------------------------------------


def test_an_export_names_the_package_that_is_missing(inner):
    check_plugins("here", {})
    check_plugins("here", {"inner-pack": "9"})
    for plugins in ({"inner-pack": "2.1", "absent-pack": "3.2"}, {"absent-pack": None}):
        with pytest.raises(InputError, match="^here .*absent-pack.*pip install absent-pack"):
            check_plugins("here", plugins)
    with pytest.raises(InputError):
        check_plugins("here", {"": "1"})
