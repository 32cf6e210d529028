"""Tags and spans from a file to the answers of an exported prompt, on one tiny backbone."""

import json

import numpy as np
import pytest
from tiny_run import (
    FILLERS,
    TOPICS,
    compare_answers,
    flags,
    jaxprompt,
    make_backbone,
    make_config,
    predict,
    read_lines,
    serve,
    with_part,
    write_rows,
)

from configs.parts.heads import HEADS
from jaxprompt.__main__ import main
from jaxprompt.build.examples import read_examples
from jaxprompt.config.load import with_overrides
from jaxprompt.convert.artifact import read_artifact, write_artifact
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError
from jaxprompt.registry import METHODS as METHODS_OF
from jaxprompt.runs.train import train_prompt

STILL = {
    "backbone.dropout": 0, "prompt.dropout": 0, "optim.lr": 3e-2, "train.total_steps": 120,
    "train.eval_steps": 40, "data.max_len": 24, "data.multiple": 24,
}  # fmt: skip


def tagged(seed, size):
    """Draws rows of words; those of a topic are entities, two in a row are one."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(size):
        words, tags = [], []
        for _ in range(3 if number else 12):  # the first takes windows
            words += (fillers := list(rng.choice(FILLERS, rng.integers(1, 3))))
            tags += ["O"] * len(fillers)
            topic = str(rng.choice(list(TOPICS)))
            fillers = list(rng.choice(TOPICS[topic], rng.integers(1, 3)))
            words += fillers
            tags += [f"B-{topic}", f"I-{topic}"][: len(fillers)]
        rows.append({"tokens": [str(word) for word in words], "tags": tags})
    return rows


def asked(seed, size):
    """Draws texts with a word of each topic, of which one is asked for."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(size):
        text, actual = "", {}
        for topic in rng.permutation(list(TOPICS)):
            text += " ".join(rng.choice(FILLERS, rng.integers(1, 8))) + " "
            actual[topic] = len(text), str(rng.choice(TOPICS[topic]))
            text += actual[topic][1] + " "
        start, word = actual["beast"]
        answers = {"text": [word], "answer_start": [start]}
        beast = {"id": f"{seed}-{len(rows)}", "question": "beast", "context": text.strip()}
        rows.append(beast | {"answers": answers})
    return rows


def sorted_words(seed, size):
    """The same words, each with a tag of its own kind: its topic, or ", ", which no scheme has."""
    rows = tagged(seed, size)
    for row in rows:
        row["tags"] = [tag.partition("-")[2] or "," for tag in row["tags"]]
    return rows


KINDS = {
    "tags": (tagged, {"head.name": "tags", "task.fields": "tokens", "task.tags": "tags"}),
    "spans": (asked, {"head.name": "spans", "task.fields": "question,context",
                      "task.answers": "answers", "head.no_answer": True, "head.tune": True}),
}  # fmt: skip
PLAIN = {
    "words": (sorted_words, {"head.name": "tags", "task.fields": "tokens", "task.tags": "tags",
                             "task.scheme": "none"}),
}  # fmt: skip


@pytest.mark.parametrize("hidden", [{"text": [], "answer_start": []}, []])
def test_a_test_split_that_hides_every_answer_is_not_scored(hidden, tmp_path):
    """One answer tells that the others are none, as of SQuAD 2.0."""
    for seed, name in ((0, "train"), (2, "dev")):
        write_rows(tmp_path / f"{name}.jsonl", asked(seed, 4))
    rows = [row | {"answers": hidden} for row in asked(1, 3)]
    path = write_rows(tmp_path / "test.jsonl", rows)
    config = make_config(tmp_path, tmp_path, "prefix", **KINDS["spans"][1])
    examples = read_examples(config)
    assert list(examples.splits) == ["train", "dev"]
    assert examples.notes == (f"test is not scored: no row of {path} states a label",)
    write_rows(path, [{"query": row["question"], "context": row["context"]} for row in rows])
    with pytest.raises(InputError, match="test.jsonl:1: there is no column 'question'"):
        read_examples(config)  # misread, not hidden
    write_rows(path, [*rows, *asked(2, 1)])
    examples = read_examples(config)
    assert len(examples.splits["test"]) == 4
    assert not any("is not scored" in note for note in examples.notes)


def test_answers_to_what_is_only_scored_stand_anywhere(tmp_path):
    """As alternatives of CMRC 2018's dev set do, whose place is -1; what trains has to stand."""
    for seed, name in ((0, "train"), (1, "dev"), (2, "test")):
        write_rows(tmp_path / f"{name}.jsonl", asked(seed, 4))
    rows = asked(1, 3)
    rows[1]["answers"] = {"text": ["a beast", *rows[1]["answers"]["text"]], "answer_start": [-1, 0]}
    write_rows(tmp_path / "dev.jsonl", rows)
    config = make_config(tmp_path, tmp_path, "prefix", **KINDS["spans"][1])
    examples = read_examples(config)
    assert [example.references for example in examples.splits["dev"]][1][0] == "a beast"
    assert examples.notes == (
        "dev: 1 of 3 questions have an answer that is not at its answer_start; "
        "only its words are compared",
    )
    write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(InputError, match="train.jsonl:2: the answer 'a beast' does not occur"):
        read_examples(config)
    rows[1]["answers"] = {"text": rows[1]["answers"]["text"][1:], "answer_start": [-1]}
    write_rows(tmp_path / "train.jsonl", rows)
    assert read_examples(config).notes[0] == (
        "train: 1 of 3 questions have an answer that is not at its answer_start; "
        "the nearest occurrence in the text is used"
    )


@pytest.fixture(scope="module", params=KINDS | PLAIN)
def trained(request, backbone, tmp_path_factory):
    """A run of a kind, exported. Returns its kind, the folder of run and data, and its result."""
    make, fields = (KINDS | PLAIN)[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    for seed, (name, size) in enumerate({"train": 48, "dev": 16, "test": 16}.items()):
        write_rows(folder / f"{name}.jsonl", make(seed, size))
    config = make_config(backbone, folder, "prefix", **STILL, **fields)
    result = train_prompt(config, str(folder / "run")).to_json()
    assert main(["export", f"--workdir={folder / 'run'}"]) == 0
    return request.param, folder, result


LEAST = {"tags": ("entity_f1", 0.3), "words": ("accuracy", 0.6), "spans": ("exact_match", 0.9)}
COLUMNS = {"tags": ("entities",), "words": (), "spans": ("score", "start", "end")}


@pytest.mark.default_cases("tags")
def test_it_learns_and_the_export_answers_as_the_run(trained, capsys):
    """By the threshold that was best on dev: it is read from the run, and not chosen again."""
    kind, folder, result = trained
    metric, least = LEAST[kind]
    assert result["dev"][metric] >= least and result["test"][metric] >= least - 0.1, result
    workdir, test = folder / "run", folder / "test.jsonl"
    rows, gold = compare_answers(capsys, workdir, test), read_lines(test)
    assert [{n: r[n] for n in g} for r, g in zip(rows, gold, strict=True)] == gold
    assert all(set(row) == {*gold[0], "prediction", *COLUMNS[kind]} for row in rows)
    _, err = predict(capsys, workdir, f"--input={test}")
    assert f"{metric} {result['test'][metric]:.4f}" in err and "on 16 of 16 examples" in err
    task = json.loads((workdir / "record.json").read_text())["task"]
    if kind == "tags":
        assert task["scheme"] == "iob2" and len(task["labels"]) == 7
        for row in rows:
            text = " ".join(row["tokens"])
            assert len(row["prediction"]) == len(row["tokens"])
            assert all(text[e["start"] : e["end"]] == e["text"] for e in row["entities"])
    elif kind == "words":
        assert task["labels"] == sorted([",", *TOPICS]) and list(result["test"]) == ["accuracy"]
        right = [p == g for r in rows for p, g in zip(r["prediction"], r["tags"], strict=True)]
        assert np.mean(right) == pytest.approx(result["test"]["accuracy"])
    else:
        head = json.loads((workdir / "export/prompt.json").read_text())["head"]
        assert head["tune"] is False and head["threshold"] == result["dev"]["threshold"] != 0
        for row in rows:
            assert row["context"][row["start"] : row["end"]] == row["prediction"]


@pytest.mark.parametrize("trained", ["tags", "spans"], indirect=True)
def test_answers_are_handed_in_as_the_benchmark_takes_them(trained, tmp_path, capsys, refused):
    kind, folder, _ = trained
    words = (f"--input={folder / 'dev.jsonl'}", "--format=squad")
    command = ("predict", f"--workdir={folder / 'run'}", *words)
    if kind == "tags":
        assert "--format=squad takes one span per question" in refused(*command)
        return
    _, err = predict(capsys, folder / "run", *words, f"--output={tmp_path}/to/")
    assert f"wrote {tmp_path}/to/predictions.json" in err
    lines, _ = predict(capsys, folder / "run", words[0])
    written = json.loads((tmp_path / "to/predictions.json").read_text())
    assert written == {line["id"]: line["prediction"] for line in lines} and len(written) == 16
    assert "--generate, --prefix and --on-error=skip" in refused(*command, "--on-error=skip")


@pytest.mark.parametrize("trained", ["tags", "spans"], indirect=True)
def test_a_plain_text_is_answered(trained, capsys, refused):
    kind, folder, _ = trained
    where = ["predict", f"--workdir={folder / 'run'}"]
    if kind == "tags":
        code, out, err = jaxprompt(capsys, *where, "--text=the cat  and a hammer")
        row = json.loads(out)
        assert code == 0 and len(row["prediction"]) == 5, err
        for entity in row["entities"]:
            assert row["tokens"][entity["start"] : entity["end"]] == entity["text"]
    else:
        assert "the task has 2 fields" in refused(*where, "--text=the cat", started=True)


@pytest.mark.parametrize("trained", ["tags"], indirect=True)
def test_scores_that_are_not_numbers_are_refused(trained, tmp_path, capsys):
    _, folder, _ = trained
    numbers, metadata = read_artifact(folder / "run/export")
    huge = {name: np.full_like(value, 3e38) for name, value in numbers.items()}
    write_artifact(tmp_path, huge, metadata)
    argv = (f"--prompt={tmp_path}", f"--input={folder / 'dev.jsonl'}")
    code, out, err = jaxprompt(capsys, "predict", *argv)
    assert code == 2 and not out, err
    assert "are NaN, first in example 1; the trained parameters are too large" in err


def test_tasks_that_do_not_fit():
    with pytest.raises(InputError, match="task.metric=accuracy counts words"):
        custom_task(fields=("tokens",), tags="tags", metric="accuracy")
    with pytest.raises(InputError, match="task.tags='tags' is also in task.fields"):
        custom_task(fields=("tokens", "tags"), tags="tags")


def test_a_list_of_tags_is_no_label(backbone, tmp_path, refused):
    rows = [{"text": "a cat", "label": ["O", "B-beast"]}] * 4
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "dev.jsonl", rows)
    fields = {"backbone.path": backbone, "task.name": "custom", "task.fields": "text",
             "data.source": tmp_path, "data.max_len": 24}  # fmt: skip
    line = refused("train", "--config=base", f"--workdir={tmp_path / 'run'}", *flags(fields))
    assert "set task.tags" in line


# -- every method, and encoders of all layouts ----------------------------------------------------

METHODS = {
    "full": {}, "prefix": {"prompt.length": 4}, "soft": {"prompt.length": 4},
    "p_tuning": {"prompt.length": 4}, "ipt": {"prompt.length": 4, "prompt.scale": 0.1},
    "compose": {"prompt.parts": "soft(length=2)+prefix(length=2)"},
    "dart": {"prompt.length": 2, "prompt.fluency": 0.0, "prompt.labels": False},
}  # fmt: skip
FAMILIES = ("albert", "deberta_v2", "modernbert")
CASES = [(family, kind, "prefix") for family in FAMILIES for kind in KINDS]
CASES += [("bert", "tags", method) for method in ("full", "ipt", "compose")]
CASES += [("bert", "spans", method) for method in ("soft", "p_tuning", "dart")]


def test_every_method_answers():
    # One is of exports, one of candidates alone, and `none` is full.
    assert set(METHODS_OF.names()) - {"constant", "dpt", "none"} == set(METHODS) - {"full"}
    assert set(METHODS) == {method for *_, method in CASES}


@pytest.mark.default_cases("albert-spans-prefix")
@pytest.mark.parametrize("family, kind, method", CASES)
def test_run_and_export_answer_alike(family, kind, method, backbone, tmp_path, capsys):
    make, head = KINDS[kind]
    folder = backbone if family == "bert" else make_backbone(tmp_path / family, family)
    for seed, name in enumerate(("train", "dev", "test")):
        write_rows(tmp_path / f"{name}.jsonl", make(seed, 16))
    fields = STILL | head | {"train.total_steps": 4, "train.eval_steps": 2} | METHODS[method]
    fields = {n: x for n, x in fields.items() if n not in ("head.name", "prompt.dropout")}
    # After the method, which may bring a head of its own.
    config = with_part(make_config(folder, tmp_path, method), HEADS[kind])
    run = serve(
        capsys, tmp_path, with_overrides(config, list(fields.items())), tmp_path / "test.jsonl"
    )
    for row in run.rows:
        if kind == "tags":
            assert len(row["prediction"]) == len(row["tokens"])
        else:
            assert row["context"][row["start"] : row["end"]] == row["prediction"]
