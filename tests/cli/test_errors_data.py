"""Bad data, templates and backbones: what a run refuses before, or as, it reads them."""

import shutil

import pytest
from safetensors.numpy import load_file, save_file
from spoil import edit
from tiny_run import read_lines, write_rows

from jaxprompt.backbones import families
from jaxprompt.build import examples
from jaxprompt.build.backbone import open_backbone
from jaxprompt.config.run import BackboneConfig, TaskConfig
from jaxprompt.errors import InputError

LABELS = {"task.labels": "beast,food,tool"}
WORDS = LABELS | {"head.name": "verbalizer", "task.template": "{text} it [mask] ."}
KFOLD = {"data.protocol": "kfold"}
REFUSED = [
    ({"data.source": "/no/where"}, "data folder /no/where does not exist"),
    ({"task.fields": "text,label"}, "task.fields includes 'label', the label column"),
    ({"task.labels": "beast,food"}, "train.jsonl:3: label 'tool' is not a label"),
    ({"task.label": "lable"}, "no column 'lable'; columns: text, label"),
    ({"task.fields": "txt"}, "columns: text, label"),
    ({"task.metric": "f1"}, "metric f1 needs 2 classes, but the task has 3; use macro_f1"),
    # Protocols.
    ({"data.protocol": "kshot", "data.protocol.k": 10}, "has 16 examples, but data.protocol.k=10"),
    ({"data.protocol": "holdout", "data.protocol.size": 48}, "data.protocol.size=48 leaves none"),
    (KFOLD | {"data.protocol.folds": 1}, "data.protocol.folds=1 "),
    (KFOLD | {"data.files.dev": "dev.jsonl"}, "data.files.dev=dev.jsonl would not be read"),
    ({"runs.folds": "0,1"}, "config.runs.folds needs data.protocol=kfold"),
    ({"data.protocol": "listed", "data.protocol.rows": "/no/rows.jsonl"}, "no/rows.jsonl: no such"),
    # Label words and room.
    (WORDS | {"task.words": "good,bad,☃"}, "label word '☃' of class 2 is not in the vocabulary"),
    (WORDS | {"task.words": "good,bad"}, "task.words has 2 entries for 3 labels"),
    ({"prompt.name": "soft", "prompt.length": 22}, "takes 24 tokens (22 for slots)"),
]  # fmt: skip


@pytest.mark.parametrize("fields, message", REFUSED)
def test_what_does_not_fit_the_data(train, fields, message):
    assert message in train(**fields)


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_each_split_is_checked(train, data, tmp_path, split):
    folder = shutil.copytree(data, tmp_path / "data")
    path = folder / f"{split}.jsonl"
    rows = read_lines(path)
    path.write_text("\n")
    assert f"{path}: the file has no rows" in train(data__source=folder)
    write_rows(path, [*rows, {"text": "a cat", "label": None}])
    line = train(data__source=folder, **LABELS)
    assert f"{path}:{len(rows) + 1}: " in line and "column 'label' is null" in line
    if split == "dev":
        path.unlink()
        line = train(data__source=folder)
        assert "has no dev split" in line and "data.files.dev" in line


def test_a_known_task_has_its_own_columns(train):
    """Fields of a custom task would be ignored, so they are refused."""
    for field, value in {"fields": "text", "label": "gold", "labels": "a,b", "target": "x"}.items():
        line = train(**{"task.name": "sst2", f"task.{field}": value})
        assert f"task.{field}=" in line and "is only valid with task.name=custom" in line
    same = {"task.label": "label", "task.labels": "negative,positive"}
    assert "no/where" in train(**{"task.name": "sst2", "data.source": "no/where"} | same)


def test_every_field_of_a_task_is_read_or_refused_for_a_known_one():
    read = {"name", "chat", "template", "words", "spaced", "option", "vocabulary", "metric"}
    read |= {"markers", "form", "answer", "eos", "positive"}
    assert set(TaskConfig.declared()) == {"fields", *read, *examples._CUSTOM_FIELDS}


# -- backbones ------------------------------------------------------------------------------------


def test_what_does_not_fit_the_backbone_is_refused_before_data(train, no_reading, model):
    line = train(data__max_len=63)
    assert "data.max_len=63 + 4 positions of the prompt exceed the model's 66" in line
    assert "lower data.max_len to 62" in line
    assert "prompt.layers='2-3' must be FIRST-LAST within 1-2" in train(prompt__layers="2-3")
    weights = load_file(model / "model.safetensors")
    trunk = {name: x for name, x in weights.items() if "pooler" not in name and "cls." not in name}
    save_file(trunk, model / "model.safetensors")
    line = train(backbone__path=model, head__pooler="checkpoint")
    assert f"{model} has no pooler" in line and "trained, cls or mean" in line
    line = train(**WORDS | {"backbone.path": model})
    assert f"{model} has no MLM head" in line and "head.name=linear" in line


def test_backbones_that_cannot_be_found(train, no_reading, tmp_path, monkeypatch):
    assert "'/no/where' is neither a folder" in train(backbone__path="/no/where")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = train(backbone__path="nobody/no-such-model")
    assert "backbone 'nobody/no-such-model' is not a local folder" in line


SIZES = (
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("changes, message", [
    *[({size: None}, f"the config lacks {size}") for size in SIZES],
    *[({size: "many"}, f"has {size}='many'") for size in SIZES],
    ({"model_type": "electra"}, "the config lacks embedding_size"),
    ({"model_type": "gpt_neo"}, f"backbone.family is one of {', '.join(families())}"),
    ({"hidden_act": "mystery"}, "hidden_act='mystery'"),
])  # fmt: skip
def test_a_config_json_of_another_kind(model, changes, message):
    edit(model / "config.json", **changes)
    with pytest.raises(InputError) as error:
        open_backbone(BackboneConfig(path=str(model)))
    assert str(model) in str(error.value) and message in str(error.value)


def test_weights_that_are_corrupt(train, model):
    path = model / "model.safetensors"
    weights = path.read_bytes()
    path.write_bytes(weights[:-1000])
    assert f"{path} is corrupt or cut short" in train(backbone__path=model)
    path.write_bytes(weights)
    edit(model / "config.json", intermediate_size=40)
    line = train(backbone__path=model)
    assert "config.json says" in line and "intermediate" in line
