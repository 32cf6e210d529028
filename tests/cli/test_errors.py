"""Bad input through the command line: one line that names value, limit and fix, exit code 2."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from spoil import BASE, PYTHON, change, edit, files
from tiny_run import ROOT, WIDTH, flags, jaxprompt, read_lines, tiny_fields, write_rows

from jaxprompt.__main__ import main
from jaxprompt.backbones import families
from jaxprompt.build import examples
from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.check import check_config
from jaxprompt.cli.options import Parser
from jaxprompt.config.load import load_config
from jaxprompt.config.run import BackboneConfig, TaskConfig
from jaxprompt.errors import InputError

# -- flags and configs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["tran"], ["unknown command 'tran'", "nearest: train"]),
        (["train", "--workdir=w"], ["--config is missing", "--help"]),
        (["train", f"--config={BASE}"], ["--workdir is missing", "--help"]),
        (["train", "--confg=x"], ["unrecognized arguments: --confg=x", "--help"]),
        (["train", "--optim.lr=1"], ["arguments: --optim.lr=1", "--config.FIELD=VALUE"]),
        (["train", f"--config={BASE}", "--config.seed"], ["--config.seed has no value"]),
        (["train", "--config=no.py", "--workdir=w"], ["config 'no.py' is not a file"]),
        (["train", "--config=no.json", "--workdir=w"], ["no.json cannot be read (No such file"]),
        (["export", f"--config={BASE}"], ["--workdir is missing"]),
        (["train", f"--config={BASE}", "--workdir="], ["--workdir: the value is empty"]),
        (["export", "--workdir=w", "--peft="], ["--peft: the value is empty"]),
        (["predict", "--prompt=p", "--prompt="], ["--prompt: the value is empty"]),
        (["show", ""], ["workdir: the value is empty"]),
        (["evaluate", f"--config={BASE}", "--workdir=w", "--split=eval"], ["'eval'", "train"]),
        (["predict"], ["--prompt or --workdir is missing"]),
        (["predict", "--prompt=p", "--text=a", "--input=b"], ["--text or --input, not both"]),
        (["predict", "--prompt=p", "--batch=0"], ["--batch=0 must be at least 1"]),
        (
            ["predict", "--prompt=p", "--batch=2147483648"],
            ["--batch: '2147483648' must be a whole"],
        ),
        (["predict", "--prompt=p", f"--batch={'9' * 5000}"], ["...", "must be a whole number"]),
        (["predict", "--prompt=p", "--dtype=f16"], ["'f16'", "float32", "bfloat16"]),
        (["predict", "--prompt=absent", "--text=a"], ["absent/prompt.json", "No such file"]),
        (["predict", "--workdir=w", "--text=a"], ["w/export", "jaxprompt export --workdir=w"]),
    ],
)
def test_flags(refused, argv, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(*argv)
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


def test_a_home_folder_is_expanded(monkeypatch):
    """A shell leaves the ~ of --workdir=~/runs as it is."""
    monkeypatch.setenv("HOME", "/home/u")
    args, overrides = Parser("x", "").read(["--workdir=~/runs", "--config.seed", "3"])
    assert args.workdir == "/home/u/runs" and overrides == [("seed", "3")]


SOFT = {"prompt.name": "soft"}
MLM = {"head.name": "verbalizer"}
# Fields, and what the line must name; all without a look at the backbone or the data.
CONFIG = [
    ({"optim.lrr": 1}, ["unknown config field 'optim.lrr'", "nearest: optim.lr"]),
    ({"prompt.lenght": 4}, ["unknown config field 'prompt.lenght'", "nearest: prompt.length"]),
    ({"optim": 1}, ["'optim' is a block", "optim.lr"]),
    ({"optim.schedule.warmup_steps": 3}, ["optim.schedule.name=warmup_linear or cosine"]),
    # Numbers.
    ({"optim.lr": "fast"}, ["optim.lr='fast' must be a number"]),
    ({"optim.lr": "1e999"}, ["optim.lr=inf must be a finite number"]),
    ({"optim.b1": 1}, ["optim.b1=1.0 must be in [0, 1)"]),
    ({"data.batch": 1.5}, ["data.batch='1.5' must be a whole number"]),
    ({"data.batch": 0}, ["data.batch=0 must be at least 1"]),
    ({"seed": -1}, ["seed=-1 must be in [0, 2**32)"]),
    ({"cache.limit": 0}, ["cache.limit=0.0 must be above 0"]),
    ({"prompt.length": 0}, ["prompt.length=0 must be at least 1"]),
    ({"train.test": "maybe"}, ["train.test='maybe' must be true or false"]),
    ({"runs.lr": "a,b"}, ["runs.lr='a,b' must be a list of numbers"]),
    # Names.
    ({"optim.name": "adam"}, ["optim.name='adam' is unknown", "nearest: adamw"]),
    ({"prompt.name": "prefx"}, ["unknown method prompt.name='prefx'", "nearest: prefix"]),
    ({"head.name": "lm"}, ["unknown head head.name='lm'", "multi_spans, regression, spans, tags"]),
    ({"task.name": "trek"}, ["unknown task 'trek'", "nearest: trec", "custom"]),
    ({"task.metric": "acuracy"}, ["task.metric='acuracy' is unknown", "nearest: accuracy"]),
    # Patterns, and what is empty or does not go together.
    ({"trainable": "head/("}, ["trainable: 'head/(' is not a valid regular expression"]),
    ({"prompt.layers": "17_24"}, ["prompt.layers='17_24' must be FIRST-LAST"]),
    ({"backbone.path": ""}, ["backbone.path is empty", "give a folder"]),
    ({"task.fields": ""}, ["task.fields is empty"]),
    ({"task.labels": "one"}, ["task.labels=one must be", "2 or more"]),
    ({"optim.accumulate": 3}, ["data.batch=16 must be divisible by optim.accumulate=3"]),
    ({"train.total_steps": 0}, ["exactly one total must be above 0", "=0; set one above 0"]),
    ({"train.total_epochs": 2}, ["exactly one total", "train.total_epochs=2.0"]),
    ({"train.eval_epochs": 0}, ["train.eval_steps=0 and train.eval_epochs=0"]),
    # Templates.
    ({"task.template": "{txt} [sep]"}, ["unknown field 'txt'", "nearest: text"]),
    ({"task.template": "{text"}, ["unbalanced '{' at character 0"]),
    ({"task.template": "{text} [soft]"}, ["the method has 0 slots", "remove [soft]"]),
    (SOFT | {"task.template": "[soft*3] {text}"}, ["places 3 soft tokens", "has 4 slots"]),
    (MLM, ["task custom has no template", "'{text} [mask]'"]),
    (MLM | {"task.name": "sst2", "task.template": "{sentence} It was good."}, ["has no [mask]"]),
    ({"task.name": "sst2", "task.words": "good"}, ["1 entries for 2 classes", "negative"]),
    # What soft tokens start from.
    (SOFT | {"prompt.start": "file"}, ["prompt.start=file needs prompt.file"]),
    (SOFT | {"prompt.start": "text"}, ["prompt.start=text needs prompt.text"]),
    (SOFT | {"prompt.start": "vocab", "prompt.text": "It"}, ["only used with prompt.start=text"]),
    (SOFT | {"prompt.start": "normal", "prompt.file": "x.npy"}, ["prompt.file="]),
    (SOFT | {"prompt.start": "frequent"}, ["corpus.path is empty"]),
]


@pytest.mark.parametrize("fields, parts", CONFIG)
def test_a_wrong_field_is_refused_before_anything_is_read(
    train, no_reading, tmp_path, fields, parts
):
    no_reading()
    line = train(**fields)
    assert all(part in line for part in parts), line
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


def test_rows_of_a_soft_prompt_must_fit(train, tmp_path):
    rows = tmp_path / "rows.npy"
    fields = SOFT | {"prompt.start": "file", "prompt.file": rows}
    for array, message in (
        (np.zeros((4, WIDTH + 1), np.float32), f"has shape [4, {WIDTH + 1}]"),
        (np.zeros((3, WIDTH), np.float32), f"[3, {WIDTH}], but the prompt needs [4, {WIDTH}]"),
        (np.zeros((4, WIDTH), int), "is not a single array of floats"),
    ):
        np.save(rows, array)
        line = train(**fields)
        assert str(rows) in line and message in line
    rows.unlink()
    assert "rows.npy" in (line := train(**fields)) and "No such file" in line


@pytest.mark.parametrize(
    "text, parts",
    [
        (PYTHON.format(line="c.optim.lr = 'fast'"), ["lr", "str", "float"]),
        (PYTHON.format(line="c.prompt.lenght = 3"), ["no field 'lenght'", "nearest: length"]),
        (PYTHON.format(line="c.optim.unheard = 1.0"), ["unknown config field 'optim.unheard'"]),
        (PYTHON.format(line="return 3"), ["must return a ConfigDict, not int"]),
        (PYTHON.format(line="1 / 0"), ["ZeroDivisionError", "division by zero"]),
        ("def get_config(:", ["SyntaxError"]),
        ("c = 3", ["get_config()"]),
    ],
)
def test_python_configs(train, no_reading, tmp_path, text, parts):
    no_reading()
    config = tmp_path / "mine.py"
    config.write_text(f"{text}\n")
    line = train(config)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    "field, value, parts",
    [
        ("optim.lr", "fast", ["optim.lr='fast' must be a finite number"]),
        ("head", None, ["config field head is missing", "train --help"]),
        ("sed", 1, ["unknown config field 'sed'", "nearest: seed"]),
        ("optim", 3, ["optim=3 must be a block"]),
        ("data.batch", 1.5, ["data.batch=1.5 must be a whole number"]),
        ("task.fields", "text", ["task.fields='text' must be a list of texts"]),
        ("train.test", "true", ["train.test='true' must be true or false"]),
        ("data.files", {"train": "", "dev": "", "tset": ""}, ["data.files.tset", "nearest: test"]),
        ("prompt.lenght", 4, ["no field 'lenght'", "nearest: length"]),
    ],
)
def test_json_configs(field, value, parts, tmp_path):
    config = json.loads(load_config("base", [("backbone.path", "here")]).to_json())
    change(config, field, value)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InputError) as error:
        check_config(load_config(str(path)))
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("content, part", [
    (b'{"seed": ', "not valid JSON"), (b"[1]", "contains a list, not an object"),
    (b"{}", "is missing"), (b"\xff\xfe{", "mine.json"),
])  # fmt: skip
def test_json_that_is_no_config(content, part, tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=part):
        load_config(str(path))


def test_debug_shows_the_traceback(backbone, data, tmp_path):
    words = ["train", f"--config={BASE}", f"--workdir={tmp_path / 'new'}", "--debug"]
    with pytest.raises(InputError, match="prompt.length=0"):
        main([*words, *flags(tiny_fields(backbone, data) | {"prompt.length": 0})])


# -- a process of its own -------------------------------------------------------------------------


def test_a_process_says_one_line_and_exits_with_2(tmp_path):
    words = ["train", f"--config={BASE}", f"--workdir={tmp_path}", "--config.task.name=trek"]
    command = [sys.executable, "-m", "jaxprompt"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("jaxprompt train: unknown task 'trek'; nearest: trec")


LOST = "UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:2"


@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_process_is_told(count, monkeypatch, capsys):
    """Of one process alone the error is another, which keeps its traceback."""

    def lose(*_):
        raise jax.errors.JaxRuntimeError(f"{LOST}\nmore")

    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr("jaxprompt.cli.train.main", lose)
    if count == 1:
        with pytest.raises(jax.errors.JaxRuntimeError):
            jaxprompt(capsys, "train", f"--config={BASE}")
    else:
        code, out, err = jaxprompt(capsys, "train", f"--config={BASE}")
        assert code == 1 and not out and len(err.splitlines()) == 1
        assert "another process of this run was lost" in err and f"({LOST})" in err


# -- out of memory --------------------------------------------------------------------------------


def run_out_in_cublas():
    """Fails as on a GPU that other processes have filled."""
    raise jax.errors.JaxRuntimeError("INTERNAL: Failed to initialize BLASLT support")


def run_out_in_cuda():
    raise jax.errors.JaxRuntimeError("INTERNAL: [0] no module: CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize(
    "run_out, message",
    [
        (lambda: jnp.zeros(2**45).block_until_ready(), "RESOURCE"),  # 128 TiB
        (lambda: np.empty(2**59, np.uint8), "Unable to a"),
        (run_out_in_cublas, "INTERNAL"), (run_out_in_cuda, "INTERNAL"),
    ],
)  # fmt: skip
def test_out_of_memory(run_out, message, monkeypatch, capsys):
    monkeypatch.setattr("jaxprompt.cli.train.main", lambda *_: run_out())
    code, out, err = jaxprompt(capsys, "train", "--workdir=w")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith(f"jaxprompt train: {message}") and "lower data.batch, " in err


# -- no device ------------------------------------------------------------------------------------


def test_devices_that_are_not_there(backbone, data, tmp_path):
    words = [f"--config={BASE}", f"--workdir={tmp_path / 'run'}"]
    run = [sys.executable, "-m", "jaxprompt", "train", *words, *flags(tiny_fields(backbone, data))]
    env = os.environ | {"JAX_PLATFORMS": "gpux"}
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    *_, line = done.stderr.splitlines()
    start = "jaxprompt train: JAX cannot start its devices: Unable to initialize backend 'gpux': "
    assert line.startswith(start) and line.endswith("or set JAX_PLATFORMS=cpu")


def test_a_platform_that_this_machine_lacks(monkeypatch, refused):
    """JAX has an assertion without a text for it."""
    of_jax = {"__name__": "jax._src.xla_bridge"}
    exec("def backends(*_): assert False", of_jax)
    monkeypatch.setattr("jaxprompt.cli.train.main", of_jax["backends"])
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    line = refused("train", f"--config={BASE}", started=True)
    assert "cannot start its devices: no device of JAX_PLATFORMS=cuda was found; " in line


# -- data and templates --------------------------------------------------------------------------

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
        line = train(data__source=folder, data__protocol="")
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
    read |= {"markers", "form", "answer", "answer_pattern", "eos", "positive"}
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
    ({"model_type": "gpt_neo"}, f"use one of {', '.join(families())}"),
    ({"model_type": "gemma4_text"}, "(its layers have heads of two sizes"),
    ({"model_type": "qwen3_5_text"}, "(most of its layers are not attention"),
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


# -- workdirs, checkpoints, exports ---------------------------------------------------------------

COMMANDS = ("train", "evaluate", "export")


def again(run: Path, command: str, *words: object) -> list[object]:
    """Writes the command that uses a run's own config."""
    saved = run.parent / "config.json"
    if not saved.exists():
        shutil.copy(run / "config.json", saved)
    return [command, f"--config={saved}", f"--workdir={run}", *words]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_workdir_of_another_config(refused, no_reading, run, command):
    no_reading()
    before = files(run)
    line = refused(*again(run, command, "--config.seed=7"))
    assert f"{run} contains a run with a different config: seed (saved 0, now 7)" in line
    assert files(run) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_other_backbone_weights(refused, run, other_backbone, command):
    (run / "result.json").unlink()
    before = files(run)
    line = refused(*again(run, command, f"--config.backbone.path={other_backbone}"))
    assert f"{run} was trained with weights" in line and "use the same backbone" in line
    assert files(run) | {"config.json": b""} == before | {"config.json": b""}


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_workdir_without_a_run(refused, no_reading, backbone, data, tmp_path, command):
    no_reading()
    words = flags(tiny_fields(backbone, data))
    line = refused(command, f"--config={BASE}", f"--workdir={tmp_path / 'none'}", *words)
    assert "no checkpoint in" in line and "train first" in line
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_checkpoint(refused, request, run, command):
    """Its best parameters, or the state from which a run resumes."""
    (best,) = (run / "checkpoints").glob("*/best")
    (run / "result.json").unlink()
    damaged = best if command != "train" else best.parent
    path = max((p for p in damaged.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-10])
    before = files(run)
    if command != "train":
        request.getfixturevalue("no_reading")()
    line = refused(*again(run, command))
    assert f"checkpoint {best.parent} is damaged or belongs to another run" in line
    assert f"delete {run} to train again" in line
    assert files(run) == before


def test_an_export_that_cannot_be_written(refused, run, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = files(run)
    line = refused(*again(run, "export", f"--output={tmp_path / 'file/out'}"))
    assert "cannot write" in line and "Not a directory" in line
    line = refused(*again(run, "export", f"--npy={tmp_path / 'train.jsonl'}"))
    assert "train.jsonl must end in .npy" in line
    line = refused(*again(run, "export", f"--npy={tmp_path / 'x.npy'}"))
    assert "--npy: a prefix prompt has no soft tokens" in line
    assert files(run) == before and (tmp_path / "file").read_text() == "mine"


def test_an_export_that_replaces_another_says_so(run, tmp_path, capsys):
    folder = shutil.copytree(run / "export", tmp_path / "out")
    words = list(map(str, again(run, "export", f"--output={folder}")))
    assert main(words) == 0
    assert "replaced" not in capsys.readouterr().err  # it is the same
    edit(folder / "prompt.json", seed=5)
    assert main(words) == 0
    line = f"{folder}: replaced another export: name 'custom', method 'prefix', "
    assert f"{line}seed 5" in capsys.readouterr().err
    assert main(words) == 0 and "replaced" not in capsys.readouterr().err


@pytest.fixture
def predict(refused, run):
    """Predicts with the run's export, which must be refused. -> its line"""
    return lambda *words: refused("predict", f"--prompt={run / 'export'}", *words)


def test_a_folder_without_an_export(predict, no_reading, run):
    no_reading()
    (run / "export/prompt.safetensors").unlink()
    assert str(run / "export/prompt.safetensors") in predict("--text=a")


def test_predicting_on_other_weights(predict, run, other_backbone, capsys):
    line = predict("--text=the cat", f"--backbone={other_backbone}")
    assert "the prompt was trained on the weights" in line and "--force" in line
    words = ["--text=the cat", f"--backbone={other_backbone}", "--force"]
    assert main(["predict", f"--prompt={run / 'export'}", *words]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] in ("beast", "food", "tool")


def test_predicting_on_another_shape(predict, model):
    edit(model / "config.json", num_attention_heads=4)
    line = predict("--text=the cat", f"--backbone={model}", "--force")
    assert "prompt/k" in line and "the backbone needs" in line


def test_input_that_cannot_be_read(predict, no_reading, tmp_path, monkeypatch):
    no_reading()
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"text": "cat"}\n{"text": \n')
    assert f"{path}:2: broken JSON" in predict(f"--input={path}", f"--output={out}")
    path.write_text("")
    assert f"{path} contains no text; give at least one" in predict(f"--input={path}")
    assert "/no/in.jsonl: no such file" in predict("--input=/no/in.jsonl")
    monkeypatch.setattr("sys.stdin", ['{"text": \n', "the cat\n"])
    assert "stdin:1: broken JSON" in predict()
    monkeypatch.setattr("sys.stdin", [])
    assert "stdin contains no text" in predict()
    monkeypatch.setattr("sys.stdin", None)
    assert "stdin is closed; use --input=FILE" in predict("--input=-")
    assert not out.exists()


def test_an_output_that_cannot_be_written(predict, refused, no_reading, run, data, tmp_path):
    """Told before the weights and the input are read. What is refused test_files shows."""
    no_reading()
    rows = data / "test.jsonl"
    for words in (["--text=the cat"], ["--column=text", f"--input={rows}"]):
        line = predict(*words, f"--output={tmp_path / 'no/out.jsonl'}")
        assert f"{tmp_path / 'no'} is not a folder that you can write to" in line
    for words in ([], ["--column=text"]):
        line = predict(f"--input={rows}", *words, f"--output={rows}")
        assert f"--output={rows} would overwrite --input={rows}" in line
    for split in ("train", "dev", "test"):
        path = data / f"{split}.jsonl"
        line = refused(*again(run, "evaluate", f"--output={path}"))
        assert f"--output={path} would overwrite {split}.jsonl of data.source={data}" in line
    path = write_rows(tmp_path / "own.jsonl", [{"text": "cat", "label": "beast"}])
    words = [f"--config.data.files.dev={path}", f"--output={path}"]
    line = refused(*again(run, "evaluate", *words))
    assert f"--output={path} would overwrite data.files.dev={path}" in line
    assert not (tmp_path / "no").exists()
