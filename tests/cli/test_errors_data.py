"""Bad data, templates and backbones through the command line: one line, exit code 2."""

import errno
import os
import shutil
import struct

import pytest
from spoil import PYTHON, edit
from tiny_run import read_lines, write_rows

from jaxprompt.backbones import families
from jaxprompt.build import examples
from jaxprompt.config.run import TaskConfig

# -- data -----------------------------------------------------------------------------------------


@pytest.fixture
def own(data, tmp_path):
    """A copy of the data to spoil."""
    return shutil.copytree(data, tmp_path / "data")


def test_files_that_cannot_be_read(train, own, tmp_path, monkeypatch):
    assert "data folder /no/where does not exist" in train(data__source="/no/where")
    line = train(data__files__train="/no/train.jsonl", data__files__dev="/no/dev.jsonl")
    assert "/no/train.jsonl: no such file; check the path" in line
    line = train(data__files__train=own, data__files__dev=own)
    assert f"{own}: is a folder, not a file; name a file in it, or give" in line
    (own / "train.jsonl").rename(own / "tarin.jsonl")
    line = train(data__source=own)
    assert f"no train file in {own}" in line and "it has: dev.jsonl" in line


def test_a_file_without_permission(train, own, monkeypatch):
    opened = open

    def deny(path, *args, **kwargs):
        if str(path).endswith("train.jsonl"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", deny)
    line = train(data__source=own)
    assert f"{own / 'train.jsonl'}: no permission to read it; check its mode" in line


@pytest.mark.parametrize("text", ['{"text": "a', "[1]", '{"text": "a"} x'])
def test_broken_lines(train, own, text):
    path = own / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], text, *lines[6:]]))
    line = train(data__source=own)
    assert f"{path}:7: " in line


def test_a_line_in_another_encoding(train, own):
    path = own / "train.jsonl"
    path.write_bytes(path.read_bytes() + b'{"text": "caf\xe9", "label": "food"}\n')
    assert f"{path}:49: not UTF-8 (byte 0xe9 at column 14)" in train(data__source=own)


@pytest.mark.parametrize("name", ["train", "dev", "test"])
def test_empty_splits(train, own, name):
    (own / f"{name}.jsonl").write_text("\n")
    assert f"{own / name}.jsonl: the file has no rows" in train(data__source=own)


def test_no_dev_split(train, own):
    (own / "dev.jsonl").unlink()
    line = train(data__source=own)
    assert "has no dev split" in line and "data.files.dev" in line and "holdout" in line


def test_the_label_is_no_field(train, own):
    line = train(data__source=own, task__fields="text,label")
    assert "task.fields includes 'label', the label column" in line


def test_numbers_are_names_where_all_classes_are_numbers(train, own):
    """1 is no class of 3, 4 and 5, by its place or otherwise."""
    stars = {"beast": "3", "food": "4", "tool": "5"}
    for path in own.glob("*.jsonl"):
        write_rows(path, [row | {"label": stars[row["label"]]} for row in read_lines(path)])
    write_rows(own / "dev.jsonl", [{"text": "cat", "label": 1}])
    line = train(data__source=own)
    assert "dev.jsonl:1: label 1 is not a label" in line and "labels: 3, 4, 5" in line


def test_labels(train, own):
    line = train(data__source=own, task__labels="beast,food")
    assert f"{own / 'train.jsonl'}:3: label 'tool' is not a label" in line
    assert "labels: beast, food" in line
    write_rows(own / "dev.jsonl", [{"text": "cat", "label": "beats"}])
    line = train(data__source=own)
    assert f"{own / 'dev.jsonl'}:1: label 'beats'" in line and "beast, food, tool" in line
    line = train(data__source=own, task__label="lable")
    assert "no label column 'lable'; columns: text, label" in line
    line = train(data__source=own, task__fields="txt")
    assert "'txt'" in line and "columns: text, label" in line
    write_rows(own / "train.jsonl", [{"text": "cat", " label": "beast"}])
    assert "no label column 'label'; columns: text, ' label'; set" in train(data__source=own)


@pytest.mark.parametrize("value, shown", [("null", "null"), ("NaN", "NaN"), ("[1, 2]", "[1, 2]")])
def test_values_that_are_no_label_or_text(train, own, value, shown):
    """They are no classes named None and nan, and no texts."""
    path = own / "train.jsonl"
    good = path.read_text()
    for row, column in ((f'"text": "a cat", "label": {value}', "label"), (
        f'"text": {value}, "label": "food"', "text")):  # fmt: skip
        path.write_text(f"{good}{{{row}}}\n")
        line = train(data__source=own)
        assert f"{path}:49: " in line and f"column '{column}' is " in line and shown in line
    path.write_text(good)
    path = own / "dev.jsonl"
    path.write_text(f'{{"text": "a cat", "label": {value}}}\n')
    assert f"{path}:1: label column 'label' is " in train(data__source=own)


def test_a_class_with_too_few_examples(train):
    line = train(data__protocol="kshot", data__protocol__k=10)
    assert "has 16 examples" in line
    assert "data.protocol.k=10 and 10 for dev needs 20" in line and "reduce the number" in line
    line = train(data__protocol="holdout", data__protocol__size=48)
    assert "data.protocol.size=48 leaves none of 48 examples" in line
    line = train(data__protocol="kfold", data__protocol__folds=1)
    assert "data.protocol.folds=1;" in line
    line = train(data__protocol="kfold", data__files__dev="dev.jsonl")
    assert "data.files.dev=dev.jsonl would not be read; set one of them to" in line
    line = train(runs__folds="0,1")
    assert "config.runs.folds needs data.protocol=kfold" in line
    line = train(data__protocol="listed", data__protocol__rows="/no/rows.jsonl")
    assert "/no/rows.jsonl: no such file" in line


def test_a_metric_that_the_classes_cannot_have(train):
    line = train(task__metric="f1")
    assert "metric f1 needs 2 classes, but the task has 3; use macro_f1" in line


# -- templates and label words --------------------------------------------------------------------


def test_label_words(train):
    fields = {"head.name": "verbalizer", "task.labels": "beast,food,tool"}
    line = train(**fields, task__template="{text} it [mask] .", task__words="good,bad,☃")
    assert "label word '☃' of class 2 is not in the vocabulary" in line and "another word" in line
    line = train(**fields, task__template="{text} it [mask] .", task__words="good,bad,good")
    assert "'good' of class 0 and 'good' of class 2 have the same tokens" in line
    line = train(**fields, task__template="{text} it [mask] .", task__words="good,bad")
    assert "task.words has 2 entries for 3 labels" in line


def test_a_known_task_has_its_own_columns(train):
    """Fields of a custom task would be ignored, so they are refused."""
    for field, value in {"fields": "text", "label": "gold", "labels": "a,b", "target": "x"}.items():
        line = train(**{"task__name": "sst2", f"task__{field}": value})
        assert (
            f"task.{field}=" in line
            and "is only valid with task.name=custom, but task.name=sst2" in line
        )
    own = {"task__label": "label", "task__labels": "negative,positive"}
    line = train(task__name="sst2", data__source="no/where", **own)
    assert "no/where" in line


def test_no_room_for_text(train, tmp_path):
    config = tmp_path / "soft.py"
    config.write_text(PYTHON.format(line="from configs.parts import methods; methods.soft(c)"))
    line = train(config, prompt__length=22)
    assert "takes 24 tokens (22 for slots)" in line and "max_len 24" in line
    assert "use fewer slots" in line


# -- backbones ------------------------------------------------------------------------------------


def test_what_does_not_fit_the_backbone_is_refused_before_data(train, no_reading):
    line = train(data__max_len=63)
    assert "data.max_len=63 + 4 positions of the prompt exceed the model's 66" in line
    assert "lower data.max_len to 62" in line
    line = train(prompt__layers="2-3")
    assert "prompt.layers='2-3' must be FIRST-LAST within 1-2" in line


def test_heads_that_the_checkpoint_lacks(train, no_reading, model):
    from safetensors.numpy import load_file, save_file

    weights = load_file(model / "model.safetensors")
    kept = {name: x for name, x in weights.items() if "pooler" not in name and "cls." not in name}
    save_file(kept, model / "model.safetensors")
    line = train(backbone__path=model, head__pooler="checkpoint")
    assert f"{model} has no pooler" in line and "trained, cls or mean" in line
    line = train(
        backbone__path=model, head__name="verbalizer", task__template="{text} [mask]",
        task__labels="beast,food,tool",
    )  # fmt: skip
    assert f"{model} has no MLM head" in line and "head.name=linear" in line


def test_backbones_that_cannot_be_found(train, no_reading, tmp_path, monkeypatch):
    assert "'/no/where' is neither a folder" in train(backbone__path="/no/where")
    assert "'absent-package' is not installed" in train(backbone__path="pkg:absent-package/model")
    (tmp_path / "empty").mkdir()
    assert "empty/config.json does not exist" in train(backbone__path=tmp_path / "empty")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = train(backbone__path="nobody/no-such-model")
    assert "backbone 'nobody/no-such-model' is not a local folder" in line
    assert "the path of a downloaded folder" in line


@pytest.mark.parametrize(
    "field",
    "hidden_size vocab_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings".split(),
)
def test_config_json_without_a_field(train, no_reading, model, field):
    edit(model / "config.json", **{field: None})
    line = train(backbone__path=model)
    assert f"{model / 'config.json'}: the config lacks {field}" in line and "give the" in line
    edit(model / "config.json", **{field: "many"})
    assert f"has {field}='many'" in train(backbone__path=model)


def test_config_json_of_another_kind(train, no_reading, model):
    path = model / "config.json"
    edit(path, model_type="electra")
    assert f"{path}: the config lacks embedding_size" in train(backbone__path=model)
    edit(path, model_type="gpt_neo")
    line = train(backbone__path=model)
    assert "'gpt_neo'" in line and f"backbone.family is one of {', '.join(families())}" in line
    edit(path, model_type="bert", hidden_act="mystery")
    assert f"{path}: hidden_act='mystery'" in train(backbone__path=model)
    path.write_text("{")
    assert f"{path} is not valid JSON" in train(backbone__path=model)


def test_weights_that_are_corrupt(train, model):
    path = model / "model.safetensors"
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    for spoilt in (
        whole[:100], b"", struct.pack("<Q", header * 10**6) + whole[8:], whole[:-1000],
        whole[:8] + b"?" + whole[9:],
    ):  # fmt: skip
        path.write_bytes(spoilt)
        line = train(backbone__path=model)
        assert f"{path} is corrupt or cut short" in line and "download it again" in line
    path.unlink()
    assert "contains neither model.safetensors nor" in train(backbone__path=model)
    path.write_bytes(whole)
    edit(model / "config.json", intermediate_size=40)
    line = train(backbone__path=model)
    assert "config.json says" in line and "intermediate" in line
    (model / "config.json").unlink()
    assert f"{model / 'config.json'} does not exist" in train(backbone__path=model)


def test_every_field_of_a_task_is_read_or_refused_for_a_known_one():
    read = {"name", "chat", "template", "words", "spaced", "option", "vocabulary", "metric"}
    read |= {"markers", "form", "answer", "eos", "positive"}
    assert set(TaskConfig.declared()) == {"fields", *read, *examples._CUSTOM_FIELDS}
