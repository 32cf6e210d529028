"""Several prompts on one backbone: each answers as it does by itself."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from test_token_heads import asked as questions
from test_token_heads import tagged
from tiny_run import TOPICS, jaxprompt, make_backbone, read_lines, write_rows

import jaxprompt as jp
from jaxprompt.errors import InputError
from jaxprompt.serving.bank import PromptBank, _check_supported

WORDS = "cat bread saw".split()
CLASSES = {"fields": "text", "label": "label"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"prefix", "soft", "tags", "spans", "choice"}, id="five"),
        pytest.param(None, id="every", marks=pytest.mark.long),
    ],
)
def prompts(request, backbone, rows, small):
    """Prompts of several or all kinds of heads, of unequal lengths, trained for a step or so.

    -> name: prompt, its rows
    """
    sentences = rows[0][:24], rows[1][:10]
    tags = tagged(0, 24), tagged(1, 8)
    spans = questions(0, 24), questions(1, 8)
    options = [
        {"question": row["text"], "a": "a cat", "b": "old bread", "answer": number % 2}
        for number, row in enumerate(rows[0][:20])
    ]
    cases = {
        "prefix": (jp.prefix(4), {}, sentences),
        "upper": (jp.prefix(6, layers="2-2"), {"head": jp.linear(pooler="mean")}, sentences),
        "soft": (jp.soft(3), {}, sentences),
        "words": (
            jp.soft(2), {"head": jp.verbalizer(), "words": tuple(TOPICS),
                         "template": "[soft] {text} : [mask]"}, sentences,
        ),
        "alone": (jp.head_only(), {}, sentences),
        "tags": (jp.prefix(5), {"head": jp.tags(), "fields": "tokens", "tags": "tags"}, tags),
        "spans": (
            jp.soft(4), {"head": jp.spans(), "fields": "question,context", "answers": "answers"},
            spans,
        ),
        "choice": (
            jp.prefix(2), {"fields": "question", "choices": "a,b", "label": "answer"},
            (options[:12], options[12:]),
        ),
        "numbers": (
            jp.soft(2), {"head": jp.regression(), "number": "stars"},
            ([{**row, "stars": len(row["text"]) % 5} for row in part] for part in sentences),
        ),
    }  # fmt: skip
    results = {}
    for name in sorted(request.param or cases, key=list(cases).index):
        method, fields, (train, dev) = cases[name]
        trained = jp.train(backbone, train, dev, method=method, **small | fields)
        results[name] = trained.prompt, dev
    return results


@pytest.fixture(scope="module")
def bank(backbone, prompts):
    by_name = {name: prompt for name, (prompt, _) in prompts.items()}
    return jp.attach(backbone, by_name, by="task", batch=16)


@pytest.fixture(scope="module")
def mixed(prompts):
    """Rows of all prompts in turns."""
    every = [{"task": name, **row} for name, (_, rows) in prompts.items() for row in rows]
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))]


@pytest.mark.long
def test_listed_classes_of_other_numbers(rows, small, tmp_path):
    """Each has a bias for its own classes, beside rows that are read at more places."""
    backbone = jp.load_backbone(make_backbone(tmp_path / "disc", "discriminator"))
    fields = {"head": jp.discriminator(bias=True), "method": jp.prefix(2)} | small
    prompts, rows_of_both = {}, []
    for name, labels in (("three", TOPICS), ("two", ["food", "tool"])):
        train, dev = ([row for row in part if row["label"] in labels] for part in rows)
        prompts[name] = jp.train(backbone, train[:12], dev[:6], **fields).prompt
        rows_of_both += [{"task": name, **row} for row in dev[:4]]
    predictions = jp.predict(jp.attach(backbone, prompts, by="task", batch=8), rows_of_both)
    for name, prompt in prompts.items():
        matching = [row for row in rows_of_both if row["task"] == name]
        right = jp.predict(jp.attach(backbone, prompt), matching)
        assert close(
            [
                prediction
                for prediction, row in zip(predictions, rows_of_both, strict=True)
                if row in matching
            ],
            right,
        )


def close(actual, right):
    """Compares answers, numbers within 1e-6."""
    if isinstance(right, dict):
        return actual.keys() == right.keys() and all(close(actual[k], right[k]) for k in right)
    if isinstance(right, list):
        return len(actual) == len(right) and all(map(close, actual, right))
    return actual == pytest.approx(right, abs=1e-6) if isinstance(right, float) else actual == right


def test_answers_are_those_of_each_prompt_alone(backbone, prompts, bank, mixed):
    predictions = jp.predict(bank, mixed)
    assert len(bank.bank.groups) == 2  # choices take rows of their own
    measured = jp.evaluate(bank, mixed)
    for name, (prompt, rows) in prompts.items():
        alone = jp.attach(backbone, prompt)
        indices = [i for i, row in enumerate(mixed) if row["task"] == name]
        task_rows = [{k: v for k, v in mixed[i].items() if k != "task"} for i in indices]
        assert close([predictions[i] for i in indices], jp.predict(alone, task_rows)), name
        assert close(measured[name], jp.evaluate(alone, rows)), name
    # A prompt that nobody asked is there all the same.
    first = next(iter(prompts))
    predictions = jp.evaluate(bank, [row for row in mixed if row["task"] == first])
    assert predictions.keys() == prompts.keys() and predictions[first]["examples"] > 0
    assert all(
        task_scores == {"examples": 0} for name, task_scores in predictions.items() if name != first
    )


def test_a_mesh_answers_as_one_device(prompts, folder, bank, mixed):
    """Examples on four devices, heads and widths on two."""
    spread = jp.load_backbone(str(folder), mesh=(4, 2))
    by_name = {name: prompt for name, (prompt, _) in prompts.items()}
    predictions = jp.predict(jp.attach(spread, by_name, by="task", batch=16), mixed)
    assert [list(row) for row in predictions] == [list(row) for row in jp.predict(bank, mixed)]
    assert close(predictions, jp.predict(bank, mixed))


def test_the_commands_answer_by_a_column(prompts, folder, mixed, bank, tmp_path, capsys):
    flags = [f"--backbone={folder}", "--column=task", "--batch=16"]
    for name, (prompt, _) in prompts.items():
        # Runs of a sweep have a = in the names of their folders.
        run = tmp_path / ("seed=0" if name == "soft" else name)
        jp.save_prompt(prompt, run / "export")
        flags.append(f"--prompt={'soft=' * (name == 'soft')}{run / 'export'}")
    path = write_rows(tmp_path / "in.jsonl", mixed)
    code, out, err = jaxprompt(capsys, "predict", *flags, f"--input={path}", "--prefix=p_")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [{k: line[k] for k in row} for line, row in zip(lines, mixed, strict=True)] == mixed
    answers = [{k[2:]: v for k, v in line.items() if k.startswith("p_")} for line in lines]
    assert close(answers, jp.predict(bank, mixed))
    assert "tags: entity_f1" in err and "on 8 of 8 examples, those with a label" in err
    code, out, err = jaxprompt(capsys, "evaluate", *flags, f"--input={path}")
    assert code == 0, err
    assert close(json.loads(out), jp.evaluate(bank, mixed))
    broken = write_rows(tmp_path / "broken.jsonl", [mixed[0], {"task": "sort", "text": "a cat"}])
    code, out, err = jaxprompt(capsys, "predict", *flags, f"--input={broken}")
    assert code == 2 and "broken.jsonl:2: unknown prompt 'sort'" in err
    assert json.loads(out)["text"] == mixed[0]["text"]  # the row before it
    code, out, err = jaxprompt(
        capsys, "predict", *flags, f"--input={broken}", "--on-error=skip", "--prefix=p_"
    )
    assert code == 0 and "unknown prompt" in json.loads(out.splitlines()[1])["p_error"], err
    assert read_lines(broken)[0].items() <= json.loads(out.splitlines()[0]).items()
    # A question that leaves no room for its text.
    question = next(row for row in mixed if row["task"] == "spans")
    long = question | {"question": "why " * 200}
    broken = write_rows(tmp_path / "long.jsonl", [question, long])
    code, out, err = jaxprompt(
        capsys, "predict", *flags, f"--input={broken}", "--on-error=skip", "--prefix=p_"
    )
    assert code == 0 and "1 of 2 lines have no answer, the first is " in err, err
    assert "leaves no room" in json.loads(out.splitlines()[1])["p_error"]
    code, out, err = jaxprompt(capsys, "evaluate", *flags, f"--input={broken}")
    assert code == 2 and "long.jsonl:2: template" in err and "leaves no room" in err


@pytest.mark.parametrize(
    "command, flags, message",
    [
        ("predict", "--prompt=a --prompt=b --input={}", "--prompt is given 2 times, and --column"),
        ("predict", "--prompt=x/a --prompt=y/a/export --column=t --input={}", "both called 'a'"),
        ("predict", "--prompt=a --column=t --text=b", "--text=['b'] is only valid for one"),
        ("predict", "--prompt=a --column=t --format=glue --input={}", "--format=glue is only"),
        ("predict", "--workdir=a --column=t --input={}", "--column=t selects one of several"),
        ("evaluate", "--workdir=a --input=b.jsonl", "--input=b.jsonl is only valid with --prompt"),
        ("evaluate", "--workdir=a --dtype=bfloat16", "--dtype=bfloat16 is only valid with"),
        ("evaluate", "--prompt=a --column=t --split=test", "--split=test is only valid for runs"),
        ("evaluate", "--prompt=a --column=t --config.seed=1 --input={}", "--config.seed=1: an"),
        ("predict", "--prompt=a --column=t --config.seed=1 --input={}", "--config.seed=1: an"),
    ],
)
def test_flags_that_do_not_go_together(command, flags, message, tmp_path, capsys):
    path = write_rows(tmp_path / "in.jsonl", [{"t": "a", "text": "b"}])
    code, out, err = jaxprompt(capsys, command, *flags.format(path).split())
    assert code == 2 and not out and message in err, err


def test_a_number_names_a_prompt():
    """As a column of numbers holds it, from JSON or with gaps."""
    bank = PromptBank(("0", "1", "true"), [], [], {}, None)
    for number, names in enumerate([(0, 0.0, "0"), (1, 1.0, "1"), (True, "true")]):
        assert [bank.find(name, "x:1") for name in names] == [number] * len(names)
    for name in (2, [0], {}, float("nan")):
        with pytest.raises(InputError, match="x:1: unknown prompt"):
            bank.find(name, "x:1")
    with pytest.raises(InputError, match="x:1: unknown prompt null; "):
        bank.find(None, "x:1")


def test_an_equals_sign_in_a_path_names_no_prompt(tmp_path, monkeypatch):
    from jaxprompt.cli.bank import _split_name

    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=0").mkdir()
    for path in ("runs/seed=0/export", "/runs/seed=0", "seed=0", "runs/a", "hub:owner/name"):
        assert _split_name(path) == ("", path)
    assert _split_name("first=runs/seed=0/export") == ("first", "runs/seed=0/export")


def test_what_makes_no_bank_is_named(backbone, prompts, rows):
    first, _ = prompts["prefix"]
    with pytest.raises(jp.InputError, match="a dict, e.g."):
        jp.attach(backbone, [first, first])
    other = {**first.card, "backbone": {**first.card["backbone"], "fingerprint": "0" * 64}}
    message = "prompt other: the prompt was trained on the weights 0{12}"
    with pytest.raises(jp.InputError, match=message):
        jp.attach(backbone, {"first": first, "other": jp.Prompt(first.tensors, other)})
    strange = {**first.card, "backbone": {**first.card["backbone"], "family": "electra"}}
    with pytest.raises(jp.InputError, match="prompt other: .* on electra"):
        strangers = {"first": first, "other": jp.Prompt(first.tensors, strange)}
        jp.attach(backbone, strangers, force=True)
    with pytest.raises(jp.InputError, match="several prompts must be exports"):
        jp.attach(backbone, [first], task="topics")
    with pytest.raises(
        jp.InputError, match="rows:1: there is no column 'prompt' with the name of the prompt"
    ):
        jp.predict(jp.attach(backbone, {"first": first}), rows[1])


@pytest.mark.parametrize(
    "reads, tensors, message",
    [
        (True, {}, "prompt a is computed from each text"),
        (False, {"backbone/norm/scale": 1}, "prompt a has tuned backbone weights"),
    ],
)
def test_what_a_bank_does_not_support_is_named(reads, tensors, message):
    scorer = SimpleNamespace(model=SimpleNamespace(prompt=SimpleNamespace(reads=reads)))
    with pytest.raises(InputError, match=message):
        _check_supported("a", SimpleNamespace(tensors=tensors), scorer)


def test_a_list_of_exports_is_named_by_their_folders(backbone, prompts, tmp_path):
    names = ("prefix", "soft")
    for name in names:
        jp.save_prompt(prompts[name][0], tmp_path / name)
    bank = jp.attach(backbone, [jp.load_prompt(tmp_path / name) for name in names], by="task")
    mixed = [{"task": name, **row} for name in names for row in prompts[name][1][:3]]
    alone = [jp.predict(jp.attach(backbone, prompts[n][0]), prompts[n][1][:3]) for n in names]
    assert close(jp.predict(bank, mixed), [*alone[0], *alone[1]])


def changed(prompt, length, **fields):
    """Gives a prefix of other numbers, cut to a length, as an export of a run of its own."""
    rng = np.random.default_rng(length)
    spread = lambda x: (x + rng.normal(0, 0.5, x.shape)).astype(np.float32)
    tensors = {
        name: spread(x[:, :length] if name in ("prompt/k", "prompt/v") else x)
        for name, x in prompt.tensors.items()
    }
    prompt_fields = prompt.card["prompt"] | {"length": length} | fields
    return jp.Prompt(tensors, {**prompt.card, "prompt": prompt_fields})


@pytest.mark.long
@pytest.mark.parametrize("family, shelves", [("mistral", 2), ("deberta_v2", 1)])
def test_prefixes_stand_where_they_do_alone(family, shelves, rows, small, tmp_path):
    """In local windows and outside of them, of any lengths; a DeBERTa reads no place of theirs."""
    backbone = jp.load_backbone(str(make_backbone(tmp_path / family, family)))
    first = jp.train(backbone, *rows, method=jp.prefix(5, start="normal"), **small).prompt
    prompts = {
        "first": first, "shorter": changed(first, 3, shift=3), "outside": changed(first, 4, shift=0)
    }  # fmt: skip
    mixed = [{"task": name, **row} for row in rows[1][:8] for name in prompts]
    bank = jp.attach(backbone, prompts, by="task", batch=16)
    predictions = jp.predict(bank, mixed)
    for number, (name, prompt) in enumerate(prompts.items()):
        alone = jp.predict(jp.attach(backbone, prompt), rows[1][:8])
        assert close(predictions[number :: len(prompts)], alone), name
    assert len(bank.bank.groups) == shelves


@pytest.mark.long
@pytest.mark.parametrize("family", ["t5", "gpt2", "mistral", "glm"])
def test_decoders_answer_as_each_prompt_alone(family, rows, small, tmp_path):
    backbone = jp.load_backbone(str(make_backbone(tmp_path / family, family)))
    layout = {"words": tuple(TOPICS), "template": "{text} : [mask]"}
    placed = layout | {"template": "[soft] {text} : [mask]"}
    cases = {
        "prefix": (jp.prefix(3), {"head": jp.verbalizer()} | layout),
        "longer": (jp.prefix(5), {"head": jp.linear()}),
        "soft": (jp.soft(2), {"head": jp.verbalizer(scores="full")} | placed),
        "pieces": (
            jp.soft(4), {"head": jp.verbalizer()} | placed | {"words": ("cat dog", "old", "saw")}
        ),
    }  # fmt: skip
    prompts = {
        name: jp.train(backbone, *rows, method=method, **small | fields).prompt
        for name, (method, fields) in cases.items()
    }
    mixed = [{"task": name, **row} for row in rows[1][:8] for name in prompts]
    predictions = jp.predict(jp.attach(backbone, prompts, by="task", batch=16), mixed)
    for number, (name, prompt) in enumerate(prompts.items()):
        alone = jp.predict(jp.attach(backbone, prompt), rows[1][:8])
        assert close(predictions[number :: len(prompts)], alone), name
