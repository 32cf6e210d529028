"""jp.train learns what the command learns, from rows of any kind, and leaves the backbone alone."""

import os
import signal

import jax
import numpy as np
import pytest
from tiny_run import jaxprompt, write_rows

import jaxprompt as jp
from jaxprompt.config.run import HoldOut
from jaxprompt.runs import train as tune
from jaxprompt.training.log import RunLog
from jaxprompt.training.run_folder import read_result


def equal(first, second):
    """Tells whether two prompts hold the same bits."""
    assert first.keys() == second.keys()
    return all(np.array_equal(first[name], second[name]) for name in first)


def test_it_learns_what_the_command_learns(trained, folder, rows, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    for name, part in zip(("train", "dev"), rows, strict=True):
        write_rows(data / f"{name}.jsonl", part)
    fields = {
        "backbone.path": folder, "task.name": "custom", "task.fields": "text", "data.source": data,
        "data.max_len": 24, "data.multiple": 24, "data.batch": 16, "train.total_epochs": 0,
        "train.total_steps": 3, "prompt.length": 4, "mesh.data": 1,
    }  # fmt: skip
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    run = ["--config=base", f"--workdir={tmp_path / 'run'}"]
    assert jaxprompt(capsys, "train", *run, *words)[0] == 0
    assert jaxprompt(capsys, "export", f"--workdir={tmp_path / 'run'}")[0] == 0
    exported = jp.load_prompt(tmp_path / "run" / "export")
    assert equal(trained.prompt.tensors, exported.tensors)
    assert trained.result["dev"] == read_result(tmp_path / "run").dev
    of = ("method", "hyper", "prompt", "head", "task", "template", "layout", "metrics")
    for name in of:
        assert trained.prompt.card[name] == exported.card[name]
    assert trained.workdir is None


def test_history_has_the_losses_and_dev(trained):
    assert [line["step"] for line in trained.history if "dev" in line] == [3]
    assert all("loss" in line or "dev" in line for line in trained.history)


@pytest.mark.long
def test_rows_of_every_kind_are_the_same_rows(trained, backbone, rows, small, tmp_path):
    import datasets
    import pandas

    labels = sorted({row["label"] for row in rows[0]})
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=labels)
    )
    kinds = (
        lambda part, name: (dict(row) for row in part),
        lambda part, name: datasets.Dataset.from_list(part, features=features),
        lambda part, name: pandas.DataFrame(part),
        lambda part, name: write_rows(tmp_path / f"{name}.jsonl", part),
    )
    for make in kinds:
        parts = [make(part, name) for part, name in zip(rows, ("train", "dev"), strict=True)]
        again = jp.train(backbone, *parts, method=jp.prefix(4), **small)
        assert equal(again.prompt.tensors, trained.prompt.tensors)


@pytest.mark.long
def test_the_backbone_stays_as_it_is_when_all_of_it_trains(backbone, rows, small):
    before = jax.tree.map(np.array, backbone.loaded.params)
    tuned = jp.train(backbone, *rows, method=jp.full(lr=0.1), **small)
    after = jax.tree.map(np.array, backbone.loaded.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    word = tuned.prompt.tensors["backbone/embed/word/table"]
    assert not np.array_equal(word, before["embed"]["word"]["table"])
    model = jp.attach(backbone, tuned.prompt)
    expected = tuned.result["dev"] | {"examples": len(rows[1])}
    assert jp.evaluate(model, rows[1]) == pytest.approx(expected)


@pytest.mark.long
def test_a_workdir_is_taken_up_and_guarded(backbone, rows, small, tmp_path):
    run = dict(method=jp.prefix(4), workdir=tmp_path / "run", **small)
    first = jp.train(backbone, *rows, **run)
    again = jp.train(backbone, *rows, **run)
    assert equal(first.prompt.tensors, again.prompt.tensors)
    assert first.history == again.history and again.workdir == tmp_path / "run"
    changed = [*rows[0][:-1], {"text": "another hammer", "label": "tool"}]
    with pytest.raises(jp.InputError, match="was trained on different data"):
        jp.train(backbone, changed, rows[1], **run)
    with pytest.raises(jp.InputError, match="different config.*optim.lr"):
        jp.train(backbone, *rows, **run, lr=0.5)


def test_rows_alone_are_a_run_whose_config_has_task_dev_and_batch(
    backbone, rows, tmp_path, monkeypatch
):
    configs = []

    def stop(config, *_):
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "train_prompt", stop)
    for given in (rows[0], str(write_rows(tmp_path / "rows.jsonl", rows[0]))):
        with pytest.raises(KeyboardInterrupt):
            jp.train(backbone, given, method="soft")
    with pytest.raises(KeyboardInterrupt):
        jp.train(backbone, rows[0], method="soft", protocol="holdout", size=10, bs=8)
    first = configs[0]
    assert all(config == first for config in configs)
    assert first.data.protocol == HoldOut(size=10) and first.data.batch == 8
    assert first.task.name == "custom" and first.task.fields == ("text",)


@pytest.mark.long
def test_dev_is_held_out_as_if_it_were_configured(backbone, rows, small):
    fields = {name: value for name, value in small.items() if name != "batch"}
    renamed = [{"message": row["text"], "team": row["label"]} for row in rows[0]]
    first = jp.train(backbone, renamed, method=jp.prefix(4), **fields)
    task = jp.task("message", label="team")
    again = jp.train(
        backbone, renamed, task=task, method=jp.prefix(4), protocol="holdout", size=10, batch=8,
        **fields,
    )  # fmt: skip
    assert equal(first.prompt.tensors, again.prompt.tensors)
    answers = jp.predict(jp.attach(backbone, first.prompt), ["a red cat"])
    assert answers == jp.predict(jp.attach(backbone, again.prompt), ["a red cat"])


@pytest.mark.long
def test_methods_and_heads_bring_their_own_fields(backbone, rows, small):
    about = jp.task(
        "text", label="label", labels=("beast", "food", "tool"), words=("cat", "rice", "saw"),
        template="{text} is [mask].",
    )  # fmt: skip
    soft = jp.train(
        backbone, *rows, task=about, method=jp.soft(3, start="text", text="new red big"),
        head=jp.verbalizer(scores="full"), **small,
    )  # fmt: skip
    card = soft.prompt.card
    assert soft.prompt.tensors.keys() == {"prompt/slots"}
    assert soft.prompt.tensors["prompt/slots"].shape == (3, 32)
    assert card["head"]["scores"] == "full" and card["label_words"] == [["cat"], ["rice"], ["saw"]]
    assert card["hyper"]["start"] == "text"


def test_numbers_of_numpy_are_numbers(backbone, rows, small):
    numbers = small | {"lr": np.float32(0.5), "seed": np.int64(1)}
    run = jp.train(backbone, *rows, method=jp.prefix(np.int64(3)), **numbers)
    assert run.result["seed"] == 1 and run.prompt.card["hyper"]["length"] == 3


@pytest.mark.long
def test_a_text_to_text_backbone_learns_and_writes(tmp_path, rows, small):
    from tiny_run import make_backbone

    t5 = jp.load_backbone(str(make_backbone(tmp_path / "t5", "t5")), dropout=0.0)
    titles = [{"text": row["text"], "title": row["label"]} for row in rows[0][:16]]
    task = jp.task("text", target="title", metric="rouge_l")
    run = jp.train(
        t5, titles, titles, task=task, method=jp.soft(4), head=jp.text(), max_new_tokens=4, **small
    )
    model = jp.attach(t5, run.prompt)
    predictions = jp.predict(model, titles[:3])
    assert [list(row) for row in predictions] == [["generated"]] * 3
    assert jp.generate(model, titles[:3]) == [row["generated"] for row in predictions]
    longer = jp.generate(model, titles[:3], max_new_tokens=8, num_beams=2)
    assert len(longer) == 3
    early = [jp.generate(model, titles[:3], num_beams=2, early_stopping=x) for x in (True, "true")]
    assert early[0] == early[1]
    assert set(jp.evaluate(model, titles)) >= {"rouge_l"}


@pytest.mark.parametrize("keeps", [True, False])
def test_ctrl_c_says_what_is_kept(backbone, rows, small, tmp_path, monkeypatch, capsys, keeps):
    def interrupt(log, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunLog, "progress", interrupt)
    folder = tmp_path / "run" if keeps else None
    message = f"the same call resumes {folder}" if keeps else "nothing is kept without a workdir"
    with pytest.raises(KeyboardInterrupt, match=f"^stopped; {message}$"):
        jp.train(backbone, *rows[:2], workdir=folder, **small)
    assert ("nothing is saved" if not keeps else "saved, run the same") in capsys.readouterr().err


# -- what is refused ------------------------------------------------------------------------------

WRONG = {
    "no dev": (dict(dev=None, protocol=""), "has no dev split"),
    "an unknown field": (dict(learning=0.1), "unknown config field 'learning'"),
    "a synonym": (dict(epoch=1), "unknown config field 'epoch'; nearest: epochs, num_epochs"),
    "a method's field": (dict(length=4), "field 'length'; nearest: prompt__length$"),
    "a backbone's field": (dict(path="x"), "unknown config field 'path'.*backbone__path"),
    "several blocks": (dict(name="x"), "several blocks; give one of optim__name, task__name"),
    "the backbone's": (dict(backbone__dtype="bfloat16"), "give it to load_backbone"),
    "a grid": (dict(seeds=(0, 1)), "train supports one run"),
    "a head's length": (dict(head=lambda: jp.linear(4)), "jp.linear has no field length"),
    "a field twice": (dict(lr=0.1, learning_rate=0.1), "lr and learning_rate are the same field"),
    "a value": (dict(lr="fast"), "optim.lr='fast' must be a number"),
    "no rows": (dict(train=[]), "has no rows"),
    "no dicts": (dict(train=["a text"]), "'a text' cannot be read as rows; give a list of dicts"),
    "words in lists": (
        dict(task=lambda: jp.task("text", words=[["cat", "dog"], ["rice"], ["saw"]])),
        "task.words=.*must be a list of texts",
    ),
    "a missing column": (dict(task=lambda: jp.task("message")), "message"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case, backbone, rows, small):
    changes, message = WRONG[case]
    changes = {name: x() if callable(x) else x for name, x in changes.items()}
    fields = dict(train=rows[0], dev=rows[1]) | small | changes
    with pytest.raises(jp.InputError, match=message):
        jp.train(backbone, **fields)


def test_a_backbone_has_its_own_fields(folder):
    with pytest.raises(jp.InputError, match="backbone.dtyp'; nearest: dtype"):
        jp.load_backbone(str(folder), dtyp="float32")
    with pytest.raises(jp.InputError, match="dtype"):
        jp.load_backbone(str(folder), dtype="float8")
    with pytest.raises(jp.InputError, match="nowhere"):
        jp.load_backbone("nowhere/at/all/here")
