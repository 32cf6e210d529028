"""Bad input through the command line: one line that names value, limit and fix, exit code 2."""

import json
import os
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spoil import BASE, PYTHON, change
from tiny_run import ROOT, WIDTH, flags, jaxprompt, tiny_fields

from jaxprompt.__main__ import main
from jaxprompt.build.check import check_config
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError

# -- flags and configs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["tran"], ["unknown command 'tran'", "nearest: train"]),
        (["train", "--workdir=w"], ["--config is missing", "--help"]),
        (["train", f"--config={BASE}"], ["--workdir is missing", "--help"]),
        (["train", "--confg=x"], ["unrecognized arguments: --confg=x", "--help"]),
        (["train", f"--config={BASE}", "--config.seed"], ["--config.seed has no value"]),
        (["train", "--config=no.py", "--workdir=w"], ["config 'no.py' does not exist"]),
        (["train", "--config=no.json", "--workdir=w"], ["no.json does not exist"]),
        (["export", f"--config={BASE}"], ["--workdir is missing"]),
        (["train", f"--config={BASE}", "--workdir="], ["--workdir: the value is empty"]),
        (["export", "--workdir=w", "--peft="], ["--peft: the value is empty"]),
        (["predict", "--prompt=p", "--prompt="], ["--prompt: the value is empty"]),
        (["show", ""], ["workdir: the value is empty"]),
        (["evaluate", f"--config={BASE}", "--workdir=w", "--split=eval"], ["'eval'", "train"]),
        (["predict"], ["--prompt or --workdir is missing"]),
        (["predict", "--prompt=p", "--text=a", "--input=b"], ["--text or --input, not both"]),
        (["predict", "--prompt=p", "--batch=0"], ["--batch=0 must be at least 1"]),
        (["predict", "--prompt=p", "--dtype=f16"], ["'f16'", "float32", "bfloat16"]),
        (["predict", "--prompt=absent", "--text=a"], ["absent/prompt.json: No such file"]),
    ],
)
def test_flags(refused, argv, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(*argv)
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


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
    ({"task.labels": "one"}, ["task.labels has one class, 'one'", "2 or more"]),
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
        (np.zeros((4, WIDTH), int), "has dtype int64"),
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
    (b'{"seed": ', "is not valid JSON"), (b"[1]", "contains a list, not an object"),
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
def test_out_of_memory(run_out, message, backbone, data, monkeypatch, capsys):
    monkeypatch.setattr("jaxprompt.cli.train.main", lambda *_: run_out())
    words = flags(tiny_fields(backbone, data))
    code, out, err = jaxprompt(capsys, "train", "--config", BASE, "--workdir=w", *words)
    (line,) = err.splitlines()
    assert code == 2 and out == "" and line.startswith(f"jaxprompt train: {message}")
    assert "lower data.batch (now 16), data.eval_batch (now 64), data.max_len (now 24), " in line
    assert "raise optim.accumulate (now 1), set backbone.remat=full" in line
    plan = shlex.split(line.partition(" of this config: ")[2])
    assert plan == ["python", "-m", "jaxprompt", "plan", f"--config={BASE}", *words]


def test_out_of_memory_in_a_grid_and_in_predict(backbone, data, monkeypatch, capsys):
    def run_out(*_):
        raise MemoryError("std::bad_alloc")

    words = flags(tiny_fields(backbone, data) | {"runs.seeds": "1,2"})
    monkeypatch.setattr("jaxprompt.cli.train.main", run_out)
    code, _, err = jaxprompt(capsys, "train", f"--config={BASE}", *words)
    assert code == 2 and "std::bad_alloc; lower runs.size (now 0): runs that train at once" in err
    assert "runs.seeds" not in err
    monkeypatch.setattr("jaxprompt.cli.predict.main", run_out)
    code, _, err = jaxprompt(capsys, "predict", "--workdir=x")
    assert (code, err) == (2, "jaxprompt predict: std::bad_alloc; lower --batch\n")


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


def test_a_platform_that_this_machine_lacks(monkeypatch, capsys):
    """JAX has an assertion without a text for it."""
    of_jax = {"__name__": "jax._src.xla_bridge"}
    exec("def backends(*_): assert False", of_jax)
    monkeypatch.setattr("jaxprompt.cli.train.main", of_jax["backends"])
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    code, _, err = jaxprompt(capsys, "train", f"--config={BASE}")
    assert (
        code == 2 and "cannot start its devices: no device of JAX_PLATFORMS=cuda was found; " in err
    )
