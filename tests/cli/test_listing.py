"""Commands that list what there is, check a config, and show where a run stands."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from spoil import BASE
from tiny_run import flags, jaxprompt, read_lines, tiny_fields, write_rows

from jaxprompt.api.choices import choice_names
from jaxprompt.data.tasks.registry import task_names


@pytest.mark.parametrize(
    "command, names",
    [
        ("tasks", task_names()),
        ("methods", choice_names("prompt")),
        ("heads", choice_names("head")),
        (
            "backbones",
            ("bert", "roberta", "electra", "t5", "gpt2", "albert", "deberta", "deberta_v2")
            + ("modernbert", "glm", "llama"),
        ),
    ],
)
def test_every_name_is_listed_and_shown(command, names, capsys):
    code, out, _ = jaxprompt(capsys, command)
    assert code == 0
    first = [line.split()[0] for line in out.splitlines()]
    assert set(first) - {"task"} == set(names)
    for name in names:
        code, out, _ = jaxprompt(capsys, command, name)
        assert code == 0 and name in out.splitlines()[0]


@pytest.mark.parametrize(
    "words, told",
    [
        (("methods", "prefix"), ("prompt.length = 20", "prompt.shift = True", "jp.prefix(")),
        (("methods", "full"), ("--config=base:full", "lr=5e-05")),
        (("heads", "tags"), ("head.stride = -1", "--config.head.name=tags")),
        (("tasks", "sst2"), ("negative, positive", "{sentence} It was [mask].", "hub:stanfordnlp")),
        (("backbones", "t5"), ("google/t5-v1_1-xxl", "4096", "relative")),
        (("backbones", "google/t5-v1_1-xl"), ("2048", "--config.backbone.path=google/t5-v1_1-xl")),
    ],
)
def test_what_is_shown(words, told, capsys):
    code, out, _ = jaxprompt(capsys, *words)
    assert code == 0
    for text in told:
        assert text in out


def test_what_is_unknown_is_named(refused):
    assert "unknown method 'prefx'; nearest: prefix" in refused("methods", "prefx")
    assert "unknown task 'sst3'; nearest: sst" in refused("tasks", "sst3")
    assert "takes no --config" in refused("heads", "--config.head.name=tags")


# -- validate -------------------------------------------------------------------------------------


def test_a_config_is_checked_with_its_data(backbone, data, capsys):
    words = flags(tiny_fields(backbone, data) | {"prompt.name": "soft", "prompt.length": 3})
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *words)
    assert code == 0
    assert "train 48, dev 30, test 24" in out
    assert "the first example: [soft] [soft] [soft] [CLS]" in out
    assert f"{'prompt/table':48s} [3, 32]" in out
    assert "3 steps of up to 16 x 24 tokens, evaluated every 3" in out
    assert out.endswith("the config is valid\n") and "has no effect" not in out
    words += ["--config.data.seed=7", "--config.task.words=cat,bread,saw"]
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *words)
    assert code == 0 and "  data.seed=7 has no effect: data.protocol is empty\n" in out
    assert "  task.words='cat,bread,saw' has no effect: head.name is linear; use head" in out
    words += ["--config.prompt.start=vocab", "--config.prompt.scale=0.5"]
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *words)
    assert code == 0 and "  prompt.scale=0.5 has no effect: prompt.start is vocab\n" in out
    words += ["--config.head.name=verbalizer", "--config.task.template={text} is [mask]"]
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *words)
    assert code == 0 and "task.words" not in out
    assert "  label words: beast = 'cat'; food = 'bread'; tool = 'saw'\n" in out


def test_the_positive_class_of_f1_is_told(backbone, data, tmp_path, capsys):
    """In validate as at the start of a run; with another metric that it is not read."""
    for name in ("train", "dev"):
        rows = [row for row in read_lines(data / f"{name}.jsonl") if row["label"] != "tool"]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    fields = tiny_fields(backbone, data) | {"data.source": tmp_path, "task.positive": "beast"}
    words = flags(fields | {"task.metric": "f1"})
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *words)
    assert code == 0 and "  f1: the positive class is beast\n" in out
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *flags(fields))
    assert code == 0 and "  task.positive='beast' has no effect: task.metric is accuracy\n" in out


def test_what_looks_wrong_in_the_examples_is_told(backbone, data, tmp_path, capsys):
    rows = read_lines(data / "train.jsonl")
    rows[0]["text"], rows[1]["text"] = "", " \t"
    for name in ("train", "dev"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    words = flags(tiny_fields(backbone, data) | {"data.source": tmp_path})
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *words)
    assert code == 0
    assert f"  examples with empty texts: train 2 of {len(rows)}, dev 2 of" in out
    assert "  dev has the same examples as train\n" in out


def test_a_grid_is_checked_whole(backbone, data, capsys, refused):
    words = flags(tiny_fields(backbone, data) | {"runs.seeds": "0,1"})
    code, out, _ = jaxprompt(capsys, "validate", f"--config={BASE}", *words)
    assert code == 0 and out.startswith("2 runs, the first of them:")
    assert "twice" in refused("validate", f"--config={BASE}", *words, "--config.runs.seeds=1,1")


def test_what_training_refuses_is_refused(backbone, data, refused):
    words = flags(tiny_fields(backbone, data))
    line = refused("validate", f"--config={BASE}", *words, "--config.data.max_len=200")
    assert "lower data.max_len" in line
    line = refused("validate", f"--config={BASE}", *words, "--config.data.source=nowhere")
    assert "nowhere" in line
    late = {"optim.schedule": "cosine", "optim.schedule.warmup_steps": 3}
    soft = {"prompt.name": "soft", "prompt.length": 3}
    starts = (
        (soft | {"prompt.start": "file", "prompt.file": "no/rows.npy"}, "no/rows.npy"),
        (soft | {"prompt.start": "text", "prompt.text": "xylophone ☃"}, "prompt.text"),
        ({"prompt.name": "prefix", "prompt.start": "text", "prompt.text": "☃"}, "prompt.text"),
    )
    spared = {"optim.no_decay": "promt/.*"}
    others = ((late, "must be less than the 3 steps"), (spared, "'promt/.*' matches no"))
    for fields, why in (*others, *starts):
        assert why in refused("validate", f"--config={BASE}", *words, *flags(fields))
    assert "pre-trains a prompt" in refused("validate", "--config=ppt/nsp")


# -- show -----------------------------------------------------------------------------------------


def test_a_finished_run_is_shown(run, capsys):
    code, out, _ = jaxprompt(capsys, "show", run)
    result = json.loads((run / "result.json").read_text())
    assert code == 0
    assert f"finished after 3 steps, best at step {result['best_step']}" in out
    assert f"dev       accuracy {result['dev']['accuracy']:.4f}" in out
    assert "dev accuracy:" in out and "step 3 to 3" in out
    assert "examples  train 48, dev 30, test 24" in out


def test_numbers_that_json_lacks_are_shown(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "odd/run")
    for name in ("result.json", "metrics.jsonl"):
        text = (run / name).read_text()
        odd = re.sub(r'("dev": {\s*"accuracy": )[0-9.e-]+', r'\1"NaN"', text)
        assert odd != text
        (tmp_path / "odd/run" / name).write_text(odd)
    code, out, _ = jaxprompt(capsys, "show", tmp_path / "odd/run")
    assert code == 0 and "dev       accuracy nan" in out
    code, out, _ = jaxprompt(capsys, "show", tmp_path / "odd")
    assert code == 0 and "accuracy nan" in out


def test_runs_of_a_folder_are_a_line_each(run, capsys):
    code, out, _ = jaxprompt(capsys, "show", run.parent)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", "run"]


@pytest.mark.long
def test_a_run_is_seen_while_it_runs_and_when_it_was_cut(backbone, data, tmp_path, capsys):
    fields = tiny_fields(backbone, data)
    fields |= {"train.total_steps": 2000, "train.eval_steps": 2, "train.save_steps": 2}
    words = [f"--config={BASE}", f"--workdir={tmp_path / 'long'}", *flags(fields)]
    child = subprocess.Popen(
        [sys.executable, "-m", "jaxprompt", "train", *words],
        stderr=subprocess.PIPE, env=os.environ, cwd=BASE.parents[1],
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "long").glob("checkpoints/*")) and child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(1.0)
        assert "running, " in jaxprompt(capsys, "show", tmp_path / "long")[1]
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
    out = jaxprompt(capsys, "show", tmp_path / "long")[1]
    assert "stopped, saved at step" in out and "the same command resumes" in out


def test_a_folder_without_a_run_is_named(refused, tmp_path):
    assert f"{tmp_path} contains no run" in refused("show", tmp_path)
    assert "workdir" in refused("show")
