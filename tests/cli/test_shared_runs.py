"""Several tasks that train one prompt, from their files to exports that answer."""

import json

import jax
import numpy as np
import pytest
from test_token_heads import tagged
from tiny_run import ROOT, jaxprompt, make_config, read_lines, sentences, succeed, write_rows

from jaxprompt.config.load import load_config
from jaxprompt.convert.artifact import read_artifact
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.layers.word_rows import unpack_ids
from jaxprompt.runs import multitask
from jaxprompt.runs.multitask import SharedTrainStages, read_tasks
from jaxprompt.runs.shared_steps import TaskBatches

STILL = {"backbone.dropout": 0, "prompt.dropout": 0, "head.dropout": 0}
SHORT = {"data.max_len": 24, "data.multiple": 24, "data.batch": 8, "optim.lr": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of three topics, of animals alone, and of tags; and the files of these tasks."""
    folder = tmp_path_factory.mktemp("shared")
    halves = [
        {"text": row["text"], "label": "beast" if row["label"] == "beast" else "thing"}
        for row in sentences(5, 40)
    ]
    cases = {
        "topics": (sentences(0, 48), {"task.fields": ["text"]}),
        "beasts": (halves[:24], {"task.fields": ["text"]}),
        "tags": (tagged(2, 24), {"task.fields": ["tokens"], "task.tags": "tags",
                                 "head.name": "tags", "head.dropout": 0}),
    }  # fmt: skip
    for name, (rows, fields_of_task) in cases.items():
        (folder / name).mkdir()
        write_rows(folder / name / "train.jsonl", rows)
        for part in ("dev", "test"):
            write_rows(folder / name / f"{part}.jsonl", rows[-10:])
        fields = {"task.name": "custom", "data.source": str(folder / name)} | fields_of_task
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder


def config_of(backbone, folder, path, *, tasks=("topics", "beasts", "tags"), **fields):
    """Writes the config of a run on tasks of the folder. -> its flag"""
    named = ",".join(str(folder / f"{name}.json") for name in tasks)
    config = make_config(
        backbone, folder / "topics", "prefix", **STILL | SHORT | {"shared.tasks": named} | fields
    )
    path.write_text(config.to_json())
    return f"--config={path}"


def test_tasks_train_one_prompt_and_are_exported_each(backbone, folder, tmp_path, capsys, refused):
    config = config_of(
        backbone, folder, tmp_path / "c.json", **{"train.total_steps": 60, "train.eval_steps": 20}
    )
    workdir = tmp_path / "run"
    out, err = succeed(capsys, "train", config, f"--workdir={workdir}")
    result = json.loads(out)
    names = ["topics", "beasts", "tags"]
    assert result["tasks"] == names and list(result["dev"])[0] == "mean"
    metrics = dict.fromkeys(names, "accuracy") | {"tags": "entity_f1"}
    scores = [result["dev"][f"{name}/{metric}"] for name, metric in metrics.items()]
    assert result["dev"]["mean"] == pytest.approx(np.mean(scores))
    assert result["dev"]["topics/accuracy"] >= 0.7, result
    assert "task topics, template" in err and "% of the steps" in err, err
    out, _ = succeed(capsys, "show", str(workdir))
    assert "topics, template" in out and "beasts, task" in out
    # The numbers of the prompt are those of every export, and each answers as the run did.
    exported = {name: read_artifact(workdir / "export" / name)[0] for name in names}
    for name in names:
        assert np.array_equal(exported[name]["prompt/k"], exported["topics"]["prompt/k"])
        path = folder / name / "test.jsonl"
        flags = [f"--prompt={workdir / 'export' / name}", f"--input={path}", "--prefix=p_"]
        code, out, err = jaxprompt(capsys, "predict", *flags)
        metric = metrics[name]
        assert code == 0 and f"{metric} {result['test'][f'{name}/{metric}']:.4f}" in err, err
    # Then one of them is tuned from it, by itself.
    first = workdir / "export" / "beasts"
    run_config = make_config(
        backbone, folder / "beasts", "prefix",
        **STILL | SHORT | {"task.fields": "text", "prompt.init": str(first),
                           "train.init_head": True,
                           "train.total_steps": 2, "train.eval_steps": 1, "optim.lr": 1e-9},
    )  # fmt: skip
    (tmp_path / "own.json").write_text(run_config.to_json())
    place = [f"--config={tmp_path / 'own.json'}", f"--workdir={tmp_path / 'own'}"]
    out, err = succeed(capsys, "train", *place)
    assert f"head initialised from {first}: head/main/" in err
    # From prompt and head of the export: it answers as the export did.
    assert json.loads(out)["test"]["accuracy"] == result["test"]["beasts/accuracy"]
    assert jaxprompt(capsys, "export", f"--workdir={tmp_path / 'own'}")[0] == 0
    actual = read_artifact(tmp_path / "own/export")[0]
    assert actual.keys() == exported["beasts"].keys() and any(n.startswith("head/") for n in actual)
    for name, x in actual.items():
        np.testing.assert_allclose(x, exported["beasts"][name], atol=1e-6, err_msg=name)
    for command in ("evaluate", "export"):
        line = refused(command, f"--workdir={workdir}", started=True)
        assert "exports each task's prompt to WORKDIR/export/NAME" in line
    line = refused("predict", f"--workdir={workdir}", "--text=a cat", started=True)
    assert all(f"export/{name}" in line for name in ("beasts", "tags", "topics"))
    again = jaxprompt(capsys, "train", config, f"--workdir={workdir}")
    assert again[0] == 0 and json.loads(again[1]) == result and "nothing to do" in again[2]


@pytest.mark.long
def test_rows_of_words_are_those_of_all_tasks(backbone, folder, tmp_path, capsys):
    """Each export has a row for every word that any task's training text has, and no other."""
    named = ",".join(str(folder / f"{name}.json") for name in ("beasts", "tags"))
    fields = {"backbone.dropout": 0, "head.dropout": 0, "shared.tasks": named, "prompt.length": 3}
    config = make_config(
        backbone, folder / "beasts", "ipt",
        **SHORT | fields | {"train.total_steps": 4, "train.eval_steps": 2},
    )  # fmt: skip
    (tmp_path / "c.json").write_text(config.to_json())
    words = [f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'run'}"]
    succeed(capsys, "train", *words)
    tokenizer, texts = load_tokenizer(backbone), {}
    for name, field in (("beasts", "text"), ("tags", "tokens")):
        rows = read_lines(folder / name / "train.jsonl")
        words = sum((row[field].split() if name == "beasts" else row[field] for row in rows), [])
        texts[name] = set(sum(encode_texts(tokenizer, words), []))
    assert texts["tags"] - texts["beasts"] and texts["beasts"] - texts["tags"]
    for name in texts:
        tensors, metadata = read_artifact(tmp_path / "run/export" / name)
        seen_ids = unpack_ids(metadata.prompt.get("seen"))
        assert set(seen_ids.tolist()) == texts["beasts"] | texts["tags"]
        assert tensors["prompt/words/table"].shape[0] == len(seen_ids)
    record = json.loads((tmp_path / "run/record.json").read_text())
    assert unpack_ids(record["seen"]).tolist() == seen_ids.tolist()


@pytest.mark.long
def test_soft_tokens_start_from_the_words_of_all_tasks(backbone, folder, tmp_path, capsys):
    soft = {"prompt.name": "soft", "train.total_epochs": 0, "train.total_steps": 3}
    named = ",".join(str(folder / f"{name}.json") for name in ("topics", "tags"))
    words = [f"--config.{name}={value}" for name, value in (SHORT | soft).items()]
    words += ["--config.prompt.start=task", "--config.prompt.length=3"]
    succeed(
        capsys, "train", f"--config={ROOT / 'configs/base.py'}", f"--workdir={tmp_path / 'run'}",
        f"--config.backbone.path={backbone}", f"--config.shared.tasks={named}", *words,
    )  # fmt: skip


def test_an_epoch_is_of_windows_and_copies(backbone, folder, tmp_path):
    """Two tasks of four copies of each example have the steps that they have one by one."""
    overrides = {"demos.per_class": 1, "demos.samples": 4, "data.max_len": 48, "data.multiple": 48}
    overrides |= {"head.name": "verbalizer", "task.template": "{text} it was [mask] ."}
    overrides |= {"train.total_steps": 0, "train.total_epochs": 2.0}
    config = config_of(
        backbone, folder, tmp_path / "c.json", tasks=("topics", "beasts"), **overrides
    )
    tasks = read_tasks(load_config(config.partition("=")[2]))
    units = sum(len(task.splits["train"].rows) for task in tasks.by_name.values())
    assert units == 4 * (48 + 24)
    assert tasks.milestones.total == 2 * units // 8


def test_each_task_is_validated(backbone, folder, tmp_path, capsys, refused):
    config = config_of(backbone, folder, tmp_path / "c.json")
    out, _ = succeed(capsys, "validate", config)
    lines = out.splitlines()
    actual = [line for line in lines if line.startswith("shared task")]
    assert actual == ["shared task topics:", "shared task beasts:", "shared task tags:"]
    assert lines[-1] == "the config is valid" and out.count("the first example: ") == 3
    assert out.count("tokens, evaluated every ") == 1 and "  head/tags/" in out
    (folder / "odd.json").write_text('{"task.name": "custom", "data.batch": true}')
    odd = config_of(backbone, folder, tmp_path / "d.json", tasks=("topics", "odd"))
    line = refused("validate", odd, started=True)
    assert "odd.json: config field data.batch='True' must be a whole number" in line


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"cache.location": "host"}, "cache.location=host caches states of one task"),
        ({"runs.seeds": "0,1"}, "config.runs and shared.tasks are both set"),
        ({"trainable": "prompt/.*,head/main/.*"}, "'head/main/.*' matches no parameter"),
        (
            {
                "trainable": "prompt/.*,head/topics/.*",
                "optim.weight_decay": 0.1,
                "optim.no_decay": "head/topics/.*",
            },
            None,
        ),
    ],
)
def test_validation_refuses_what_training_does(backbone, folder, tmp_path, capsys, fields, why):
    """And nothing else: the names of parameters are those of all tasks together."""
    overrides = {"train.total_steps": 1, "train.eval_steps": 1, "train.test": False}
    flag = config_of(backbone, folder, tmp_path / "c.json", tasks=("topics", "beasts"), **overrides)
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    trained = jaxprompt(capsys, "train", flag, f"--workdir={tmp_path / 'run'}", *words)
    validated = jaxprompt(capsys, "validate", flag, *words)
    assert trained[0] == validated[0] == (0 if why is None else 2), trained[2]
    if why is not None:
        lines = [err.splitlines()[-1].partition(": ")[2] for _, _, err in (trained, validated)]
        assert lines[0] == lines[1] and why in lines[0]


@pytest.mark.long
def test_a_cut_run_ends_where_a_whole_one_does(backbone, folder, tmp_path, capsys, monkeypatch):
    fields = {"train.total_steps": 8, "train.eval_steps": 4, "train.patience": 0}
    config = config_of(backbone, folder, tmp_path / "c.json", **fields)
    whole, _ = succeed(capsys, "train", config, f"--workdir={tmp_path / 'whole'}")
    take = TaskBatches.__next__

    def taking(batches):
        if batches.get_state()["at"] == 6:
            raise KeyboardInterrupt
        return take(batches)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TaskBatches, "__next__", taking)
        multitask.train_shared_prompt(
            load_config(config.removeprefix("--config="), []), str(tmp_path / "cut")
        )
    resumed, err = succeed(capsys, "train", config, f"--workdir={tmp_path / 'cut'}")
    assert "resumed at step 4" in err
    whole, resumed = json.loads(whole), json.loads(resumed)
    assert (whole["dev"], whole["test"]) == (resumed["dev"], resumed["test"])


@pytest.mark.long
def test_a_task_whose_fields_were_edited_is_not_gone_on_with(
    backbone, folder, tmp_path, capsys, refused
):
    other, task_fields = folder / "edited.json", json.loads((folder / "beasts.json").read_text())
    other.write_text(json.dumps(task_fields))
    fields = {"train.total_steps": 1, "train.eval_steps": 1}
    config = config_of(backbone, folder, tmp_path / "c.json", tasks=("topics", "edited"), **fields)
    place = [config, f"--workdir={tmp_path / 'run'}"]
    assert jaxprompt(capsys, "train", *place)[0] == 0
    for field, value in {"data.max_len": 16, "data.batch": 4, "head.dropout": 0.5}.items():
        other.write_text(json.dumps(task_fields | {field: value}))
        assert f"tasks.edited.fields.{field} (saved" in refused("train", *place, started=True)
    other.write_text(json.dumps(task_fields))
    assert jaxprompt(capsys, "train", *place)[0] == 0


def test_a_step_leaves_the_heads_of_other_tasks(backbone, folder, tmp_path):
    config = config_of(
        backbone, folder, tmp_path / "c.json",
        **{"train.total_steps": 8, "train.eval_steps": 8, "optim.weight_decay": 0.1},
    )  # fmt: skip
    work = SharedTrainStages(
        load_config(config.removeprefix("--config="), []), str(tmp_path / "run")
    )
    job = work.build(work.prepare(None, None))
    state, step, feed = job.state, jax.jit(job.step), job.feed()
    visited = set()
    for _ in range(6):
        batch = feed.next_batch()
        new, measured = step(state, job.frozen, batch)
        # The optimizer counts the steps of a head: Adam's first moves each number by the rate.
        bias = f"head/{batch.task}/out/bias"
        if batch.task not in visited:
            moved = np.abs(new.trainable[bias] - state.trainable[bias])
            np.testing.assert_allclose(moved, float(measured["lr"]["head"]), rtol=1e-2)
        for name, leaf in state.trainable.items():
            moves = not name.startswith("head/") or name.startswith(f"head/{batch.task}/")
            assert moves != np.array_equal(leaf, new.trainable[name]), (name, batch.task)
        visited.add(batch.task)
        state = new
    feed.batches.close()
    assert len(visited) > 1


@pytest.mark.parametrize(
    "tasks, changes, message",
    [
        (("topics",), {}, "shared.tasks names 1 task; give 2 or more"),
        (("topics", "../{folder}/topics"), {}, "have the same task name 'topics'"),
        (("topics", "absent"), {}, "absent.json cannot be read"),
        (("topics", "other"), {"optim.lr": 1}, "optim.lr is shared by all tasks; give fields of"),
        (("topics", "other"), {"task.nam": "a"}, "other.json: unknown config field 'task.nam'"),
        (
            ("topics", "other"),
            {"task.tags": "tags"},
            "task other: head.name=linear does not support",
        ),
    ],
)
def test_bad_input_is_one_line(backbone, folder, tmp_path, tasks, changes, message, refused):
    (folder / "other.json").write_text(json.dumps({"task.name": "custom"} | changes))
    tasks = [name.format(folder=folder.name) for name in tasks]
    config = config_of(backbone, folder, tmp_path / "c.json", tasks=tasks)
    assert message in refused("train", config, f"--workdir={tmp_path / 'run'}")


def test_a_batch_of_a_task_that_the_mesh_does_not_divide(backbone, folder, tmp_path, refused):
    (folder / "other.json").write_text(json.dumps({"task.name": "custom", "data.batch": 6}))
    config = config_of(
        backbone, folder, tmp_path / "c.json", tasks=("topics", "other"), **{"mesh.data": 4}
    )
    assert "task other: data.batch=6" in refused("train", config, f"--workdir={tmp_path / 'run'}")


def test_a_method_with_an_objective_of_its_own_is_refused(backbone, folder, refused_config):
    """DART's fluency objective would score hidden words by the head of a task."""
    fields = {"task.template": "{text} [soft*4] [mask]", "task.fields": "text"}
    for name in ("one", "two"):
        task_fields = {"task.name": "custom", "data.source": str(folder / "topics"), **fields}
        task_fields["task.fields"] = ["text"]
        (folder / f"{name}.json").write_text(json.dumps(task_fields))
    shared = f"{folder / 'one.json'},{folder / 'two.json'}"
    config = make_config(
        backbone, folder / "topics", "dart",
        **SHORT | fields | {"shared.tasks": shared, "prompt.fluency": 1.0},
    )  # fmt: skip
    line = refused_config(config, "train")
    assert "prompt.name=dart has an additional objective" in line and "prompt.fluency=0" in line
