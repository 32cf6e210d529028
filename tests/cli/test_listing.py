"""Commands that list what there is, check a config, and show where a run stands."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from spoil import BASE
from tiny_run import flags, jaxprompt, read_lines, succeed, tiny_fields, write_rows

from jaxprompt.__main__ import commands
from jaxprompt.api.signatures import choice_names
from jaxprompt.cli import listing
from jaxprompt.cli.completion import parser_of
from jaxprompt.cli.export import _note_unfinished
from jaxprompt.cli.show import print_result
from jaxprompt.data.tasks.registry import task_names
from jaxprompt.training.run_folder import lock_workdir, read_result

FAMILIES = (
    "albert bart bert deberta deberta_v2 distilbert electra eurobert glm gpt2 gpt_neox llama "
    "modernbert mpnet opt roberta t5 t5gemma xlm_roberta_xl"
).split()


@pytest.mark.parametrize(
    "command, names",
    [
        ("tasks", task_names()), ("methods", choice_names("prompt")),
        ("heads", choice_names("head")),
        ("backbones", FAMILIES),
    ],
)  # fmt: skip
def test_every_name_is_listed_and_shown(command, names, capsys):
    out, _ = succeed(capsys, command)
    first = [line.split()[0] for line in out.splitlines()]
    assert set(first) - {"task"} == set(names)
    for name in names:
        out, _ = succeed(capsys, command, name)
        assert name in out.splitlines()[0]


@pytest.mark.parametrize(
    "words, message",
    [
        (("methods", "prefix"), ("prompt.length = 20", "prompt.shift = True", "jp.prefix(")),
        (("methods", "full"), ("--config=base:full", "lr=5e-05")),
        (("heads", "tags"), ("head.stride = -1", "--config.head.name=tags")),
        (("tasks", "sst2"), ("negative, positive", "{sentence} It was [mask].", "hub:stanfordnlp")),
        (("backbones", "t5"), ("google/t5-v1_1-xxl", "4096", "relative")),
        (("backbones", "google/t5-v1_1-xl"), ("2048", "--config.backbone.path=google/t5-v1_1-xl")),
    ],
)
def test_what_is_shown(words, message, capsys):
    out, _ = succeed(capsys, *words)
    for text in message:
        assert text in out


def test_a_preset_without_a_docstring_has_no_description(monkeypatch):
    """As with PYTHONOPTIMIZE=2, which also removes the docstrings of modules."""
    presets = SimpleNamespace(full=lambda config: None, prefix=lambda config: None)
    monkeypatch.setattr(listing, "part_of", lambda _: presets)
    assert listing.first_line("prompt", "full") == ""
    assert listing.first_line("prompt", "prefix").startswith("P-tuning v2")


def test_what_is_unknown_is_named(refused):
    assert "unknown method 'prefx'; nearest: prefix" in refused("methods", "prefx")
    assert "unknown task 'sst3'; nearest: sst" in refused("tasks", "sst3")
    assert "takes no --config" in refused("heads", "--config.head.name=tags")


# -- validate -------------------------------------------------------------------------------------


@pytest.fixture
def validate(backbone, data, capsys):
    """Validates a tiny config with some fields changed. Returns what is printed."""

    def call(**changes):
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        words = flags(tiny_fields(backbone, data) | changes)
        out, _ = succeed(capsys, "validate", f"--config={BASE}", *words)
        assert out.endswith("the config is valid\n")
        return out

    return call


def test_a_config_is_checked_with_its_data(validate):
    soft = {"prompt.name": "soft", "prompt.length": 3}
    out = validate(**soft)
    assert "train 48, dev 30, test 24" in out
    assert "the first example: [soft] [soft] [soft] [CLS]" in out
    assert f"{'prompt/table':48s} [3, 32]" in out
    assert "3 steps of up to 16 x 24 tokens, evaluated every 3" in out
    assert "has no effect" not in out
    soft |= {"data.seed": 7, "task.words": "cat,bread,saw"}
    out = validate(**soft, prompt__start="vocab", prompt__scale=0.5)
    assert "  data.seed=7 has no effect: data.protocol is empty\n" in out
    assert "  task.words='cat,bread,saw' has no effect: head.name is linear; use head" in out
    assert "  prompt.scale=0.5 has no effect: prompt.start is vocab\n" in out
    out = validate(**soft, head__name="verbalizer", task__template="{text} is [mask]")
    assert "task.words" not in out
    assert "  label words: beast = 'cat'; food = 'bread'; tool = 'saw'\n" in out
    assert validate(runs__seeds="0,1").startswith("2 runs, the first of them:")


def test_examples_are_checked(validate, data, tmp_path):
    """The positive class of F1, texts that are empty, and examples of two splits."""
    rows = [row for row in read_lines(data / "train.jsonl") if row["label"] != "tool"]
    rows[0]["text"], rows[1]["text"] = "", " \t"
    for name in ("train", "dev"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    fields = {"data.source": tmp_path, "task.positive": "beast"}
    assert "  f1: the positive class is beast\n" in validate(**fields, task__metric="f1")
    out = validate(**fields)
    assert "  task.positive='beast' has no effect: task.metric is accuracy\n" in out
    assert f"  examples with empty texts: train 2 of {len(rows)} (the first at" in out
    assert f"  repeated examples: dev {len(rows) - 2} of {len(rows)} also in train" in out


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"runs.seeds": "1,1"}, "twice"),
        ({"optim.schedule": "cosine", "optim.schedule.warmup_steps": 3}, "less than the 3 steps"),
        ({"optim.no_decay": "promt/.*"}, "'promt/.*' matches no"),
        ({"prompt.start": "text", "prompt.text": "☃"}, "prompt.text"),
    ],
)
def test_what_training_refuses_is_refused(fields, message, backbone, data, refused):
    words = flags(tiny_fields(backbone, data) | fields)
    assert message in refused("validate", f"--config={BASE}", *words)


def test_a_config_of_another_command_is_refused(refused):
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
    assert f"export    python -m jaxprompt export --workdir={run}\n" in out
    out, _ = succeed(capsys, "show", run.parent)
    assert [line.split()[0] for line in out.splitlines()] == ["run", "run"]


def test_a_run_is_shown_before_its_end(run, capsys):
    dev = json.loads((run / "result.json").read_text())["dev"]
    (run / "result.json").unlink()
    out = jaxprompt(capsys, "show", run)[1]
    assert f"dev       accuracy {dev['accuracy']:.4f}, best so far, at step 3\n" in out
    assert "stopped, saved at step 3; the same command resumes" in out
    with lock_workdir(run):
        assert "running, saved at step 3" in jaxprompt(capsys, "show", run)[1]
    shutil.rmtree(run / "checkpoints")
    out = jaxprompt(capsys, "show", run)[1]
    assert "stopped, before its first checkpoint; the same command starts it again" in out
    (run / "error.txt").write_bytes(b"step 3 \xff")
    out = succeed(capsys, "show", run)[0]
    assert "failed, will not be retried by its grid: step 3 \ufffd" in out


def test_the_export_of_an_unfinished_run_is_noted(run, tmp_path, capsys):
    _note_unfinished(str(run))
    _note_unfinished(str(tmp_path / "zero_shot"))
    assert capsys.readouterr().err == ""
    (run / "result.json").unlink()
    _note_unfinished(str(run))
    assert capsys.readouterr().err.startswith(f"{run} has not finished")


@pytest.mark.parametrize("terminal, as_json", [(True, False), (True, True), (False, False)])
def test_a_result_is_a_summary_in_a_terminal_only(run, capsys, monkeypatch, terminal, as_json):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    print_result(read_result(run), str(run), as_json)
    out = capsys.readouterr().out
    if terminal and not as_json:
        assert out == jaxprompt(capsys, "show", run)[1].partition("\n\n")[0] + "\n"
    else:
        assert out.count("\n") == 1
        assert json.loads(out) == json.loads((run / "result.json").read_text())


def test_a_folder_without_a_run_is_named(refused, tmp_path):
    assert f"{tmp_path} contains no run" in refused("show", tmp_path)
    assert "workdir" in refused("show")


# -- completion ----------------------------------------------------------------------------------


def offered(line: str, tmp_path) -> list[str]:
    """Asks as a shell does. Returns what it is offered."""
    pytest.importorskip("argcomplete")
    out = tmp_path / "out"
    env = os.environ | {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "_ARGCOMPLETE_IFS": "\n", "COMP_TYPE": "9",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "jaxprompt"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out.read_text().split("\n")


@pytest.mark.parametrize(
    "line, some",
    [
        ("jaxprompt tr", {"train"}),
        ("jaxprompt train --config.optim.l", {"--config.optim.lr", "--config.optim.lr_head"}),
        ("jaxprompt train --config.prompt.name ", {"prefix", "none"}),
        ("jaxprompt train --config.task.name ", {"sst2", "custom"}),
    ],
)
def test_what_is_offered(line, some, tmp_path):
    assert some <= set(offered(line, tmp_path))


def test_an_open_quote_offers_nothing(tmp_path):
    assert offered('jaxprompt predict --text="a --on', tmp_path) == [""]


def test_every_command_has_a_parser():
    for name in commands():
        assert parser_of(name).description
