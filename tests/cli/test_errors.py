"""Bad input through the command line: one line that names value, limit and cure, exit code 2."""

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import ROOT, WIDTH, flags, make_backbone, tiny_fields, write_rows

from jaxprompt.__main__ import main
from jaxprompt.cli.options import load_config, resolved
from jaxprompt.errors import InputError

BASE = ROOT / "configs" / "base.py"


@pytest.fixture(autouse=True)
def configs_are_found(monkeypatch):
    """A config in a temporary folder imports the repository's `configs`."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="session")
def other_backbone(tmp_path_factory):
    """A folder of the same shape with other weights."""
    return make_backbone(tmp_path_factory.mktemp("other") / "bert", seed=1)


@pytest.fixture(scope="session")
def trained(backbone, data, tmp_path_factory):
    """A finished run's folder, exported. Copy it before you change it."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    words = flags(tiny_fields(backbone, data))
    assert main(["train", f"--config={BASE}", f"--workdir={workdir}", *words]) == 0
    assert main(["export", f"--config={workdir / 'config.json'}", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def refused(capsys):
    """Runs a verb that must refuse. -> its line on stderr, without "jaxprompt VERB: " """

    def call(*argv: object) -> str:
        argv = [str(word) for word in argv]
        capsys.readouterr()
        code = main(argv)
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert code == 2, f"exit code {code}, stderr {err!r}"
        assert out == ""
        said = [line for line in lines if line.startswith(f"jaxprompt {argv[0]}: ")]
        assert len(said) == 1 and said[0] == lines[-1], err
        assert len(said[0]) < 800
        return said[0].removeprefix(f"jaxprompt {argv[0]}: ")

    return call


@pytest.fixture
def train(refused, backbone, data, tmp_path):
    """Starts a tiny run, some fields changed, that must be refused. -> its line"""

    def call(config: Path = BASE, workdir: Path = tmp_path / "new", **changes: object) -> str:
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        words = flags(tiny_fields(backbone, data) | changes)
        line = refused("train", f"--config={config}", f"--workdir={workdir}", *words)
        assert not (workdir / "config.json").exists() or workdir != tmp_path / "new"
        return line

    return call


@pytest.fixture
def no_reading(monkeypatch):
    """Makes reading data, a tokenizer, or weights an error: a wrong config is refused before."""

    def forbid(*_args, **_kwargs):
        raise AssertionError("read before the config was checked")

    for name in ("sources.read_split", "load_weights"):
        monkeypatch.setattr(f"jaxprompt.build.{name}", forbid)
    monkeypatch.setattr("jaxprompt.scorer.load_tokenizer", forbid)
    return lambda: monkeypatch.setattr("jaxprompt.scorer.folder.resolve", forbid)


def files(folder: Path) -> dict[str, bytes]:
    """Reads every file of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# -- flags and configs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["tran"], ["unknown verb 'tran'", "nearest: train"]),
        (["train", "--workdir=w"], ["--config is missing", "--help"]),
        (["train", f"--config={BASE}"], ["--workdir is missing", "--help"]),
        (["train", "--confg=x"], ["unrecognized arguments: --confg=x", "--help"]),
        (["train", f"--config={BASE}", "--config.seed"], ["--config.seed has no value"]),
        (["train", "--config=no.py", "--workdir=w"], ["config 'no.py' does not exist"]),
        (["train", "--config=no.json", "--workdir=w"], ["no.json cannot be read", "No such file"]),
        (["export", f"--config={BASE}"], ["--workdir is missing"]),
        (["evaluate", f"--config={BASE}", "--workdir=w", "--split=eval"], ["'eval'", "train, dev"]),
        (["predict"], ["--prompt or --workdir is missing"]),
        (["predict", "--prompt=p", "--text=a", "--input=b"], ["--text or --input, not both"]),
        (["predict", "--prompt=p", "--batch=0"], ["--batch=0 must be at least 1"]),
        (["predict", "--prompt=p", "--batch=x"], ["invalid int value: 'x'"]),
        (["predict", "--prompt=p", "--dtype=f16"], ["'f16'", "float32", "bfloat16"]),
        (["predict", "--prompt=absent", "--text=a"], ["absent/prompt.json: No such file"]),
    ],
)
def test_flags(refused, argv, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(*argv)
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


# field -> (value, what the line must say); all without a look at the backbone.
CONFIG = {
    "optim.lrr": ("1", ["unknown config field 'optim.lrr'", "nearest: optim.lr"]),
    "optim": ("1", ["'optim' is a block", "optim.lr"]),
    "prompt.lenght": ("4", ["unknown config field 'prompt.lenght'", "nearest: prompt.length"]),
    "optim.lr": ("fast", ["optim.lr='fast' must be a number"]),
    "optim.lr ": ("nan", ["optim.lr", "must be a number"]),
    "optim.lr  ": ("1e999", ["optim.lr=inf must be a finite number"]),
    "optim.lr   ": ("None", ["optim.lr=None must be a finite number"]),
    "optim.lr    ": ("-1", ["optim.lr=-1.0 must be at least 0"]),
    "optim.lr_head": ("1e999", ["optim.lr_head=inf must be a finite number"]),
    "optim.b1": ("1", ["optim.b1=1.0 must be in [0, 1)"]),
    "data.batch": ("1.5", ["data.batch='1.5' must be a whole number"]),
    "data.batch ": ("0", ["data.batch=0 must be at least 1"]),
    "data.batch  ": ("-4", ["data.batch=-4 must be at least 1"]),
    "data.eval_batch": ("0", ["data.eval_batch=0 must be at least 1"]),
    "data.max_len": ("0", ["data.max_len=0 must be at least 1"]),
    "data.side": ("middle", ["data.side='middle' is unknown", "left, right"]),
    "train.test": ("maybe", ["train.test='maybe' must be true or false"]),
    "optim.accumulate": ("3", ["data.batch=16 must divide by optim.accumulate=3"]),
    "optim.name": ("adam", ["optim.name='adam' is unknown", "nearest: adamw"]),
    "optim.schedule": ("cosine", ["optim.schedule='cosine' is unknown", "nearest: linear"]),
    "optim.no_decay": ("(", ["'(' is no regular expression"]),
    "trainable": ("head/(", ["trainable: 'head/(' is no regular expression"]),
    "prompt.name": ("prefx", ["unknown method prompt.name='prefx'", "nearest: prefix"]),
    "prompt.length": ("0", ["prompt.length=0 must be at least 1"]),
    "prompt.length ": ("-3", ["prompt.length=-3 must be at least 1"]),
    "prompt.dropout": ("1", ["prompt.dropout=1.0 must be in [0, 1)"]),
    "prompt.hidden": ("-1", ["prompt.hidden=-1 must be at least 0"]),
    "prompt.layers": ("17_24", ["prompt.layers='17_24' must be FIRST-LAST"]),
    "backbone.path": ("", ["backbone.path is empty", "give a folder"]),
    "backbone.family": ("berd", ["backbone.family='berd' is unknown", "nearest: bert"]),
    "backbone.dtype": ("float16", ["backbone.dtype='float16' is unknown", "bfloat16"]),
    "backbone.stack": ("loop", ["backbone.stack='loop' is unknown", "scan, unroll"]),
    "backbone.remat": ("some", ["backbone.remat='some' is unknown"]),
    "backbone.attention": ("flash", ["backbone.attention='flash' is unknown"]),
    "backbone.dropout": ("1.5", ["backbone.dropout=1.5 must be in [0, 1)"]),
    "head.name": ("lm", ["head.name='lm' is unknown", "linear, verbalizer"]),
    "head.pooler": ("max", ["head.pooler='max' is unknown", "mean"]),
    "head.scores": ("all", ["head.scores='all' is unknown", "full"]),
    "task.name": ("trek", ["unknown task 'trek'", "nearest: trec", "custom"]),
    "task.metric": ("acuracy", ["task.metric='acuracy' is unknown", "nearest: accuracy"]),
    "task.fields": ("", ["task.fields is empty"]),
    "task.labels": ("one", ["task.labels has one class, 'one'", "2 or more"]),
    "task.template": ("{txt} [sep]", ["unknown field 'txt'", "nearest: text"]),
    "task.template ": ("{text", ["unbalanced '{' at character 0"]),
    "task.template  ": ("{text} [soft]", ["the method has 0 slots", "take [soft] out"]),
    "data.protocol": ("k-shot", ["data.protocol='k-shot' is unknown", "nearest: kshot"]),
    "data.seed": ("-1", ["data.seed=-1 must be in [0, 2**32)"]),
    "seed": ("-1", ["seed=-1 must be in [0, 2**32)"]),
    "train.total_steps": ("0", ["exactly one total must be above 0", "train.total_steps=0"]),
    "train.total_steps ": ("-3", ["train.total_steps=-3 must be at least 0"]),
    "train.total_epochs": ("2", ["exactly one total", "train.total_epochs=2.0", "the others to 0"]),
    "train.eval_epochs": ("0", ["train.eval_steps=0 and train.eval_epochs=0"]),
}


@pytest.mark.parametrize("field", CONFIG)
def test_a_wrong_field_is_refused_before_anything_is_read(train, no_reading, field, tmp_path):
    value, parts = CONFIG[field]
    if field != "backbone.path":
        no_reading()
    line = train(**{field.strip(): value})
    assert all(part in line for part in parts), line
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    "fields, parts",
    [
        ({"task.name": "sst2", "task.words": "good"}, ["1 entries for 2 classes", "negative"]),
        ({"task.name": "sst2", "task.fields": "sentence", "head.name": "verbalizer",
          "task.template": "{sentence} It was good."}, ["has no [mask]", "add one"]),
        ({"head.name": "verbalizer"}, ["task custom has no template", "'{text} [mask]'"]),
    ],
)  # fmt: skip
def test_a_task_that_does_not_fit_itself(train, no_reading, fields, parts):
    no_reading()
    line = train(**fields)
    assert all(part in line for part in parts), line


def test_soft_prompts(train, no_reading, backbone, tmp_path):
    no_reading()
    config = tmp_path / "soft.py"
    config.write_text(
        "from configs.base import get_config as base\n"
        "from configs.parts import methods\n"
        "def get_config():\n"
        "    c = base()\n"
        "    methods.soft(c)\n"
        "    return c\n"
    )
    assert "prompt.length=0 must be at least 1" in train(config, prompt__length=0)
    line = train(config, prompt__start="random")
    assert "prompt.start='random' is unknown" in line and "vocab" in line
    assert "prompt.start=file needs prompt.file" in train(config, prompt__start="file")
    assert "prompt.start=text needs prompt.text" in train(config, prompt__start="text")
    line = train(config, task__template="[soft*3] {text}")
    assert "places 3 soft tokens, but the prompt has 4 slots" in line


def test_rows_of_a_soft_prompt_must_fit(train, tmp_path):
    config = tmp_path / "soft.py"
    config.write_text(
        "from configs.base import get_config as base\n"
        "from configs.parts import methods\n"
        "def get_config():\n"
        "    c = base()\n"
        "    methods.soft(c, start='file')\n"
        "    return c\n"
    )
    rows = tmp_path / "rows.npy"
    for shape, parts in (
        ((4, WIDTH + 1), [f"has shape [4, {WIDTH + 1}]", f"[length, {WIDTH}]"]),
        ((3, WIDTH), [f"[3, {WIDTH}]", f"[4, {WIDTH}]"]),
    ):
        np.save(rows, np.zeros(shape, np.float32))
        line = train(config, prompt__file=rows)
        assert str(rows) in line and all(part in line for part in parts), line
    rows.unlink()
    assert "rows.npy" in (line := train(config, prompt__file=rows)) and "No such file" in line


PYTHON = """
from configs.base import get_config as base
def get_config():
    c = base()
    {line}
    return c
"""


@pytest.mark.parametrize(
    "line, parts",
    [
        ("c.optim.lr = 'fast'", ["lr", "str", "float"]),
        ("c.optim.lrr = 1.0", []),
        ("c.prompt.lenght = 3", ["method 'prefix' has no field 'lenght'", "nearest: length"]),
        ("c.optim.unheard = 1.0", ["unknown config field 'optim.unheard'"]),
        ("del c.optim.clip", ["config field optim.clip is missing"]),
        ("c.prompt.update_from = 1", []),
        ("return 3", ["must return a ConfigDict, not int"]),
        ("1 / 0", ["ZeroDivisionError", "division by zero"]),
        ("import absent_module", ["ModuleNotFoundError", "absent_module"]),
    ],
)
def test_python_configs(train, no_reading, tmp_path, line, parts):
    no_reading()
    config = tmp_path / "mine.py"
    config.write_text(PYTHON.format(line=line))
    said = train(config)
    assert all(part in said for part in parts), said


def test_python_configs_that_are_no_configs(train, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text("def get_config(:\n")
    assert "SyntaxError" in train(config)
    config.write_text("c = 3\n")
    assert "has no get_config()" in train(config)


def change(tree: dict, field: str, value: object) -> None:
    """Sets a dotted field of nested dicts; removes it where the value is None."""
    *parents, last = field.split(".")
    for part in parents:
        tree = tree[part]
    tree[last] = value
    if value is None:
        del tree[last]


@pytest.mark.parametrize(
    "field, value, parts",
    [
        ("optim.lr", "fast", ["optim.lr='fast' must be a finite number"]),
        ("optim.lr", float("nan"), ["optim.lr=nan must be a finite number"]),
        ("optim.lr", True, ["optim.lr=True must be a finite number"]),
        ("optim.lrr", 1.0, ["unknown config field 'optim.lrr'", "nearest: lr"]),
        ("optim.clip", None, ["config field optim.clip is missing", "configs/base.py"]),
        ("seed", None, ["config field seed is missing"]),
        ("sed", 1, ["unknown config field 'sed'", "nearest: seed"]),
        ("optim", 3, ["optim=3 must be a block of fields"]),
        ("data.batch", 1.5, ["data.batch=1.5 must be a whole number"]),
        ("data.batch", "16", ["data.batch='16' must be a whole number"]),
        ("task.fields", "text", ["task.fields='text' must be a list of texts"]),
        ("task.fields", [1], ["task.fields=(1,) must be a list of texts"]),
        ("train.test", "true", ["train.test='true' must be true or false"]),
        ("data.files", {"train": ""}, ["config field data.files.dev is missing"]),
        ("data.files", {"train": "", "dev": "", "tset": ""}, ["data.files.tset", "nearest: test"]),
        ("prompt.length", "4", ["prompt.length='4' must be a whole number"]),
        ("prompt.lenght", 4, ["no field 'lenght'", "nearest: length"]),
        ("prompt.shift", 1, ["prompt.shift=1 must be true or false"]),
        ("prompt.name", None, ["prompt.name is missing"]),
        ("prompt", "prefix", ["prompt='prefix' must be a block of fields"]),
    ],
)
def test_json_configs(refused, no_reading, trained, tmp_path, field, value, parts):
    no_reading()
    config = json.loads((trained / "config.json").read_text())
    change(config, field, value)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(config))
    line = refused("train", f"--config={path}", f"--workdir={tmp_path / 'new'}")
    assert all(part in line for part in parts), line


def test_json_configs_that_are_no_configs(refused, tmp_path):
    path = tmp_path / "mine.json"
    for text, part in (
        ('{"seed": ', "is not valid JSON"),
        ("[1]", "must hold an object"),
        ("{}", "is missing"),
        ("\x00\x01", "is not valid JSON"),
    ):
        path.write_text(text)
        line = refused("train", f"--config={path}", f"--workdir={tmp_path / 'new'}")
        assert part in line
    path.write_bytes(b"\xff\xfe{")
    assert "mine.json" in refused("train", f"--config={path}", f"--workdir={tmp_path / 'new'}")


def test_debug_shows_the_traceback(backbone, data, tmp_path):
    words = ["train", f"--config={BASE}", f"--workdir={tmp_path / 'new'}", "--debug"]
    with pytest.raises(InputError, match="prompt.length=0"):
        main([*words, *flags(tiny_fields(backbone, data) | {"prompt.length": 0})])


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
    assert "unknown file format" in line and ".jsonl" in line
    (own / "train.jsonl").rename(own / "tarin.jsonl")
    line = train(data__source=own)
    assert f"no train file in {own}" in line and "it holds: dev.jsonl" in line


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
    line = train(data__source=own, task__metric="f1")
    assert "metric f1" in line


def test_a_class_with_too_few_examples(train):
    line = train(data__protocol="kshot", data__k=10)
    assert "class 'beast' has 16 examples" in line or "has 16 examples" in line
    assert "K = 10 and 10 for dev needs 20" in line and "ask for fewer" in line
    line = train(data__protocol="holdout", data__size=48)
    assert "size = 48 leaves no row of 48" in line
    line = train(data__protocol="kfold", data__folds=1)
    assert "folds = 1" in line
    line = train(data__protocol="listed", data__rows="/no/rows.jsonl")
    assert "/no/rows.jsonl: no such file" in line


# -- templates and label words --------------------------------------------------------------------


def test_label_words(train):
    fields = {"head.name": "verbalizer", "task.labels": "beast,food,tool"}
    line = train(**fields, task__template="{text} it [mask] .", task__words="good,bad,☃")
    assert "label word '☃' of class 2 is not in the vocabulary" in line and "another word" in line
    line = train(**fields, task__template="{text} it [mask] .", task__words="good,bad,good")
    assert "'good' of class 0 and 'good' of class 2 are the same tokens" in line
    line = train(**fields, task__template="{text} it [mask] .", task__words="good,bad")
    assert "task.words has 2 entries for 3 labels" in line


def test_no_room_for_text(train, tmp_path):
    config = tmp_path / "soft.py"
    config.write_text(PYTHON.format(line="from configs.parts import methods; methods.soft(c)"))
    line = train(config, prompt__length=22)
    assert "takes 24 tokens (22 of them slots)" in line and "max_len 24" in line
    assert "use fewer slots" in line


# -- backbones ------------------------------------------------------------------------------------


@pytest.fixture
def model(backbone, tmp_path):
    """A copy of the backbone to spoil."""
    return shutil.copytree(backbone, tmp_path / "model")


def edit(path: Path, **changes: object) -> None:
    """Changes fields of a JSON file; None removes one."""
    value = json.loads(path.read_text())
    for name, new in changes.items():
        change(value, name, new)
    path.write_text(json.dumps(value))


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
    assert "is no folder and no hub id" in train(backbone__path="/no/where")
    assert "'absent-package' is not installed" in train(backbone__path="pkg:absent-package/model")
    (tmp_path / "empty").mkdir()
    assert "empty/config.json does not exist" in train(backbone__path=tmp_path / "empty")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = train(backbone__path="nobody/no-such-model")
    assert "backbone 'nobody/no-such-model' is no folder here" in line
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
    assert "'gpt_neo'" in line and "bert, electra, roberta" in line
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
        assert f"{path} is corrupt or cut short" in line and "fetch it anew" in line
    path.unlink()
    assert "holds neither model.safetensors nor" in train(backbone__path=model)
    path.write_bytes(whole)
    edit(model / "config.json", intermediate_size=40)
    line = train(backbone__path=model)
    assert "config.json says" in line and "intermediate" in line
    (model / "config.json").unlink()
    assert f"{model / 'config.json'} does not exist" in train(backbone__path=model)


# -- workdirs, checkpoints, exports ---------------------------------------------------------------


def again(run: Path, verb: str, *words: object) -> list[object]:
    """Writes the command that uses a run's own config."""
    config = run / "config.json"
    saved = run.parent / "config.json"
    if not saved.exists():
        shutil.copy(config, saved)
    return [verb, f"--config={saved}", f"--workdir={run}", *words]


@pytest.mark.parametrize("verb", ["train", "evaluate", "export"])
def test_a_workdir_of_another_config(refused, no_reading, run, verb):
    no_reading()
    before = files(run)
    line = refused(*again(run, verb, "--config.seed=7"))
    assert f"{run} holds a run of another config: seed (saved 0, given 7)" in line
    assert "another --workdir" in line
    (run / "result.json").unlink()
    line = refused(*again(run, verb, "--config.head.pooler=mean"))
    assert "head.pooler (saved 'auto', given 'mean')" in line
    assert files(run) == {k: v for k, v in before.items() if k != "result.json"}


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_a_workdir_without_a_run(refused, no_reading, backbone, data, tmp_path, verb):
    no_reading()
    words = flags(tiny_fields(backbone, data))
    line = refused(verb, f"--config={BASE}", f"--workdir={tmp_path / 'none'}", *words)
    assert "no checkpoint in" in line and "train first" in line
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_a_best_that_is_damaged(refused, no_reading, run, verb):
    no_reading()
    (folder,) = (run / "checkpoints/best").iterdir()
    spoil = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    spoil.write_bytes(spoil.read_bytes()[:-10])
    before = files(run)
    line = refused(*again(run, verb))
    assert f"checkpoint {folder} is damaged or foreign" in line and "delete it" in line
    assert files(run) == before


def test_resuming_from_a_damaged_checkpoint(refused, run):
    (run / "result.json").unlink()
    newest = max((run / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    spoil = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole = spoil.read_bytes()
    spoil.write_bytes(whole[:-10])
    before = files(run)
    line = refused(*again(run, "train"))
    assert f"checkpoint {newest} is damaged or foreign" in line and "delete it" in line
    assert files(run) == before


def test_a_checkpoint_of_another_model(refused, run, backbone, data, tmp_path):
    fields = tiny_fields(backbone, data) | {"prompt.length": 3}
    other = tmp_path / "other"
    assert main(["train", f"--config={BASE}", f"--workdir={other}", *flags(fields)]) == 0
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    (run / "result.json").unlink()
    before = files(run)
    for verb in ("train", "evaluate", "export"):
        line = refused(*again(run, verb))
        assert "is of another model or optimizer" in line and "prompt/table" in line
        assert files(run) == before


@pytest.mark.parametrize("verb", ["train", "evaluate", "export"])
def test_other_backbone_weights(refused, run, other_backbone, verb):
    (run / "result.json").unlink()
    words = again(run, verb, f"--config.backbone.path={other_backbone}")
    before = {k: v for k, v in files(run).items() if k != "config.json"}
    line = refused(*words)
    assert f"{run} was trained on weights" in line and "give the same backbone" in line
    assert {k: v for k, v in files(run).items() if k != "config.json"} == before


def test_a_result_that_is_damaged(refused, run):
    (run / "result.json").write_text('{"method": ')
    line = refused(*again(run, "train"))
    assert f"{run / 'result.json'} cannot be read" in line and "delete it" in line


def test_a_full_disk_leaves_the_earlier_checkpoint(
    refused, backbone, data, tmp_path, monkeypatch, capsys
):
    from jaxprompt import checkpoint

    run = tmp_path / "run"
    fields = {"train.save_steps": 1, "train.eval_steps": 3}
    words = flags(tiny_fields(backbone, data) | fields)
    sealed = checkpoint._checksums

    def full(path):
        if "checkpoints/2" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sealed(path)

    monkeypatch.setattr(checkpoint, "_checksums", full)
    line = refused("train", f"--config={BASE}", f"--workdir={run}", *words)
    assert f"cannot write {run / 'checkpoints/2'}: No space left on device" in line
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["1"]
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(ROOT))
    assert main(["train", f"--config={BASE}", f"--workdir={run}", *words]) == 0
    assert "resumed at step 1" in capsys.readouterr().err
    assert json.loads((run / "result.json").read_text())["steps"] == 3


def test_a_workdir_that_cannot_be_written(train, refused, no_reading, trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    line = train(workdir=tmp_path / "file/run")
    assert f"cannot write {tmp_path / 'file/run'}: Not a directory" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_an_export_that_cannot_be_written(refused, run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    before = files(run)
    line = refused(*again(run, "export", f"--output={tmp_path / 'file/out'}"))
    assert "cannot write" in line and "Not a directory" in line

    def deny(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("os.replace", deny)
    line = refused(*again(run, "export"))
    assert "cannot write" in line and "Permission denied" in line
    assert files(run) == before
    monkeypatch.undo()
    line = refused(*again(run, "export", f"--npy={tmp_path / 'x.npy'}"))
    assert "--npy: a prefix prompt has no soft tokens" in line


@pytest.fixture
def predict(refused, run):
    """Predicts with the run's export, which must be refused. -> its line"""
    return lambda *words: refused("predict", f"--prompt={run / 'export'}", *words)


def test_exports_that_are_not_whole(predict, no_reading, run):
    no_reading()
    tensors, card = run / "export/prompt.safetensors", run / "export/prompt.json"
    data, text = tensors.read_bytes(), card.read_text()
    tensors.write_bytes(data[:-10])
    assert f"{tensors} is no whole safetensors file" in predict("--text=a")
    tensors.write_bytes(data)
    card.write_text(text[:50])
    assert f"{card} is no whole JSON" in predict("--text=a")
    card.write_text('{"model_type": "bert"}')
    assert f"{card} is not the card of a prompt" in predict("--text=a")
    for block in ("task", "layout", "fixed", "head"):
        spoilt = json.loads(text)
        spoilt[block] = {}
        card.write_text(json.dumps(spoilt))
        line = predict("--text=a")
        assert f"the card lacks {block}." in line and "export the prompt again" in line
    tensors.unlink()
    assert "No such file" in predict("--text=a")


def test_predicting_on_other_weights(predict, run, other_backbone, capsys):
    line = predict("--text=the cat", f"--backbone={other_backbone}")
    assert "the prompt was learned on weights" in line and "--force" in line
    words = ["--text=the cat", f"--backbone={other_backbone}", "--force"]
    assert main(["predict", f"--prompt={run / 'export'}", *words]) == 0
    assert json.loads(capsys.readouterr().out)["label"] in ("beast", "food", "tool")


def test_predicting_on_another_shape(predict, model):
    edit(model / "config.json", num_attention_heads=4)
    line = predict("--text=the cat", f"--backbone={model}", "--force")
    assert "prompt/k" in line and "the backbone needs" in line


def test_input_lines_that_are_broken(predict, no_reading, tmp_path, monkeypatch):
    no_reading()
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "cat"}\n{"text": \n')
    out = tmp_path / "out.jsonl"
    assert f"{path}:2: broken JSON" in predict(f"--input={path}", f"--output={out}")
    path.write_text("")
    assert f"{path}: the file has no rows" in predict(f"--input={path}")
    assert "/no/in.jsonl: no such file" in predict("--input=/no/in.jsonl")
    monkeypatch.setattr("sys.stdin", ["the cat\n", '{"text": \n'])
    assert "stdin:2: broken JSON" in predict()
    monkeypatch.setattr("sys.stdin", [])
    assert "stdin holds no text" in predict()
    assert not out.exists()


def test_input_rows_without_the_field(predict, tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [{"text": "cat"}, {"txt": "cat"}])
    line = predict(f"--input={path}")
    assert f"{path}:2: column 'text'" in line and "columns: txt" in line


# -- a process of its own -------------------------------------------------------------------------


def test_a_process_says_one_line_and_exits_with_2(tmp_path):
    words = ["train", f"--config={BASE}", f"--workdir={tmp_path}", "--config.task.name=trek"]
    command = [sys.executable, "-m", "jaxprompt"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("jaxprompt train: unknown task 'trek'; nearest: trec")
    done = subprocess.run([*command, *words, "--debug"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "Traceback" in done.stderr and "InputError" in done.stderr
    for words, part in ((["--help"], "usage: jaxprompt VERB"), (["train", "--help"], "--workdir")):
        done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0 and part in done.stdout and done.stderr == ""


def test_the_saved_config_is_a_config(trained):
    saved = trained / "config.json"
    assert resolved(load_config(str(saved))) == json.loads(saved.read_text())
