"""Answers of every other kind from a file to the predictions of an export, on tiny backbones.

Numbers, candidates of questions, sets of spans, semantic roles, relations, and facts.
Tags and single spans have a file of their own.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import (
    FILLERS,
    ROOT,
    TOPICS,
    WORDS,
    accuracy,
    flags,
    jaxprompt,
    make_backbone,
    make_config,
    predict,
    read_lines,
    sentences,
    serve,
    succeed,
    train_and_export,
    with_part,
    write_rows,
)

from configs.dart import relations as dart_relations
from configs.parts.heads import HEADS
from jaxprompt.cli.sweep import list_runs
from jaxprompt.config.load import load_config, with_overrides
from jaxprompt.data.text.words import template_ids
from jaxprompt.errors import InputError
from jaxprompt.runs.grid.expand import select_best_runs
from jaxprompt.scoring.span_sets import score_span_sets
from jaxprompt.training.run_result import RunResult

sys.path.insert(0, str(Path(__file__).parents[1] / "scoring"))
from srl_eval import f1_of, official  # noqa: E402


def write_splits(folder, make, **sizes):
    """Writes the rows of a kind for each split. Returns the file of the test split."""
    for seed, (name, size) in enumerate(sizes.items()):
        write_rows(folder / f"{name}.jsonl", make(seed, size))
    return folder / "test.jsonl"


# -- numbers --------------------------------------------------------------------------------------


def counted(seed, size):
    """Draws texts with up to four beasts among other words; their number is asked for."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(size):
        words = [*rng.choice(TOPICS["beast"], number % 5), *rng.choice(FILLERS, 6)]
        rows.append({"sentence": " ".join(map(str, rng.permutation(words))), "beasts": number % 5})
    return rows


def test_numbers(backbone, tmp_path, capsys):
    test = write_splits(tmp_path, counted, train=60, dev=20, test=20)
    fields = {
        "head.name": "regression", "task.fields": "sentence", "task.number": "beasts",
        "task.limits": "0,4", "train.total_steps": 60, "train.eval_steps": 20, "optim.lr": 0.02,
    }  # fmt: skip
    config = make_config(backbone, tmp_path, "prefix", **fields)
    result, workdir, rows, log = serve(capsys, tmp_path, config, test)
    assert "beasts in train: 60 numbers, 0 to 4, mean 2" in log
    assert list(result["test"]) == ["pearson", "spearman"] and result["test"]["pearson"] > 0.5
    numbers = [row["prediction"] for row in rows]
    assert all(0 <= number <= 4 for number in numbers)
    # Numbers within the limits are what the run measured without them, save at both ends.
    correlation = np.corrcoef(numbers, [row["beasts"] for row in rows])[0, 1]
    assert correlation == pytest.approx(result["test"]["pearson"], abs=0.1)
    gold = read_lines(test)
    write_rows(tmp_path / "odd.jsonl", [gold[0] | {"beasts": -1}, *gold[1:]])
    _, err = predict(capsys, workdir, f"--input={tmp_path / 'odd.jsonl'}")
    assert "on 19 of 20 examples, those with a label" in err


# -- candidates -----------------------------------------------------------------------------------


def gaps(seed, size):
    """Asks what a sentence is about, of the three topics."""
    return [
        {"sentence": f"{row['text']} is ___", "options": list(TOPICS), "answers": [row["label"]]}
        for row in sentences(seed, size)
    ]


def test_candidates_have_a_line_each_and_a_score_per_question(backbone, tmp_path, capsys):
    test = write_splits(tmp_path, gaps, train=16, dev=10, test=8)
    fields = {
        "task.fields": "sentence,word", "task.question": "sentence", "task.metric": "answer_f1",
        "task.candidate": "word", "task.candidates": "options,answers", "task.placeholder": "___",
        "train.total_steps": 40, "train.eval_steps": 20, "optim.lr": 0.05,
    }  # fmt: skip
    config = make_config(backbone, tmp_path, "prefix", **fields)
    result, workdir, log = train_and_export(capsys, tmp_path, config)
    assert list(result["test"]) == ["answer_f1", "exact_match", "accuracy"]
    assert "train 48, dev 30, test 24" in log
    lines, _ = predict(capsys, workdir, f"--input={test}")
    assert len(lines) == 24 and not any("___" in line["sentence"] for line in lines)
    right = 0
    for number, row in enumerate(read_lines(test)):
        candidates = lines[3 * number :][:3]
        assert [line["word"] for line in candidates] == row["options"]
        best = max(candidates, key=lambda line: line["scores"]["1"])
        right += best["word"] in row["answers"]
    for metric in ("exact_match", "answer_f1"):
        assert right / 8 == pytest.approx(result["test"][metric])


# -- sets of spans --------------------------------------------------------------------------------


def asked(seed, size):
    """Draws texts with words of every topic, of which all beasts are asked for."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(size):
        text, beasts = "", []
        for topic in rng.permutation([*TOPICS, *(["beast"] * (number % 2))]):
            text += " ".join(rng.choice(FILLERS, rng.integers(1, 5))) + " "
            word = str(rng.choice(TOPICS[topic]))
            beasts += [(len(text), word)] * (topic == "beast")
            text += f"{word} "
        answers = {"text": [w for _, w in beasts], "answer_start": [at for at, _ in beasts]}
        rows.append({"question": "beast", "context": text.strip(), "answers": answers})
    return rows


@pytest.mark.long
def test_sets_of_spans(tmp_path, capsys):
    backbone = make_backbone(tmp_path / "electra", "discriminator")
    test = write_splits(tmp_path, asked, train=48, dev=16, test=16)
    fields = {
        "head.tune": True, "task.fields": "question,context", "task.answers": "answers",
        "data.max_len": 24, "data.multiple": 24, "optim.lr": 3e-3, "train.total_steps": 80,
        "train.eval_steps": 40,
    }  # fmt: skip
    config = with_part(make_config(backbone, tmp_path, "full"), HEADS["multi_spans"])
    config = with_overrides(config, list(fields.items()))
    result, workdir, lines, log = serve(capsys, tmp_path, config, test)
    assert "train: 24 of 48 questions with several answers, 0 without" in log
    assert result["test"]["f1"] > 0.6, result
    for line in lines:
        for span in line["spans"]:
            assert line["context"][span["start"] : span["end"]] == span["text"]
        assert [span["text"] for span in line["spans"]] == line["prediction"]
    gold = [[line["answers"]["text"]] for line in lines]
    scores = score_span_sets("f1", gold, [line["prediction"] or [""] for line in lines])
    assert {name: result["test"][name] for name in scores} == pytest.approx(scores)
    head = json.loads((workdir / "export" / "prompt.json").read_text())["head"]
    assert head["tune"] is False and head["threshold"] == result["dev"]["threshold"]
    succeed(capsys, "inspect", f"--workdir={workdir}", "--split=test")
    assert (workdir / "inspect" / "inspect.html").exists()


# -- semantic roles -------------------------------------------------------------------------------


def props(seed, size):
    """Writes sentences with two predicates, tools: beasts and food around one are its A0, in two
    parts, and all beasts are a role of both, which is learned soon.
    """
    rng, lines = np.random.default_rng(seed), []
    pick = lambda topic: str(rng.choice(TOPICS[topic]))
    for number in range(size):
        words, verbs, columns = [], [], [[], []]
        for verb in range(2):
            fillers = [str(w) for w in rng.choice(FILLERS, 8 if number == 0 else 2)]
            sentence = [
                *fillers,
                pick("beast"),
                pick("beast"),
                pick("food"),
                pick("tool"),
                pick("food"),
            ]
            shared = ["*"] * len(fillers) + ["(A1*", "*)"]
            roles = [*shared, "(A0*)", "(V*)", "(C-A0*)"]
            words += sentence
            verbs += [word if word in TOPICS["tool"] else "-" for word in sentence]
            for column in range(2):
                columns[column] += roles if column == verb else [*shared, "*", "*", "*"]
        lines += [" ".join(cells) for cells in zip(words, verbs, *columns, strict=True)] + [""]
    return "\n".join(lines) + "\n"


ROLES = {
    "head.name": "tags", "task.name": "conll05", "optim.lr": 3e-2, "train.total_steps": 60,
    "train.eval_steps": 30, "data.max_len": 24, "head.decode": "viterbi",
}  # fmt: skip


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    """A folder of CoNLL's files."""
    folder = tmp_path_factory.mktemp("roles")
    for seed, (name, size) in enumerate({"train": 16, "dev": 4, "test": 6}.items()):
        (folder / f"{name}.props").write_text(props(seed, size))
    return folder


@pytest.mark.long
def test_a_line_per_predicate_with_its_roles(backbone, roles, tmp_path, capsys):
    config = make_config(backbone, roles, "prefix", **ROLES, **{"task.markers": "a,a"})
    result, workdir, log = train_and_export(capsys, tmp_path, config)
    assert list(result["test"]) == ["role_f1", "precision", "recall", "accuracy", "entity_f1"]
    assert "roles in train: A0 32, A1 64, C-A0 32, V 32; 2 texts are split into windows" in log
    assert "train 32, dev 8, test 12" in log and result["dev"]["role_f1"] > 0.1
    card = json.loads((workdir / "export/prompt.json").read_text())
    assert card["template"] == "{tokens|marked} [sep] {predicate}"
    lines, _ = predict(capsys, workdir, f"--input={roles / 'test.props'}")
    assert len(lines) == 12
    for line in lines:
        text, place = " ".join(line["tokens"]), line["predicate_span"]
        assert place["word"] == line["predicate"] and "entities" not in line
        assert text[place["start"] : place["end"]] == line["tokens"][line["predicate"]]
        assert all(text[r["start"] : r["end"]] == r["text"] for r in line["roles"])
        befores = ["O", *line["prediction"]]
        for old, tag in zip(befores, line["prediction"], strict=False):
            assert tag[0] != "I" or (old[0] in "BI" and old[2:] == tag[2:])  # IOB2
    scores = f1_of(*official([line["tags"] for line in lines], [x["prediction"] for x in lines]))
    assert scores == pytest.approx({name: result["test"][name] for name in scores})
    assert scores["role_f1"] > 0.1
    for decode, least in (("viterbi", scores["role_f1"]), ("argmax", 0)):
        words = (f"--workdir={workdir}", "--split=test", f"--config.head.decode={decode}")
        out, _ = succeed(capsys, "evaluate", *words)
        assert json.loads(out)["role_f1"] >= least - 1e-6


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"task.template": "{tokens} [sep] {predicate}", "task.markers": "a,a"},
         "does not say where; write {tokens|marked}"),
        ({"task.labels": "A0,V"}, "tag 'B-A1' is not one of task conll05: O, B-A0, I-A0, B-V, I-V"),
        ({"task.name": "conll04"}, "set task.predicate to the column"),
    ],
)  # fmt: skip
def test_roles_that_do_not_fit_are_named(fields, message, backbone, roles, refused_config):
    assert message in refused_config(make_config(backbone, roles, "prefix", **ROLES | fields))


# -- relations ------------------------------------------------------------------------------------

RELATIONS = {
    "task.fields": "text", "task.entities": "<e1>|</e1>,<e2>|</e2>", "task.negative": "none",
    "task.metric": "micro_f1", "task.words": "beast,food,tool,it", "data.max_len": 40,
    "task.labels": "is_beast,is_food,is_tool,none",
    "data.multiple": 40, "train.total_steps": 40, "train.eval_steps": 20,
}  # fmt: skip
METHODS = {
    "dart": {
        "task.template": "{text|soft} {entity1} [soft*2] [mask] [soft*1] {entity2}",
        "prompt.length": 7, "prompt.text": "a a an an is the near", "prompt.fluency": 0.2,
        "optim.lr": 1e-3,
    },
    "prefix": {"task.template": "{text|marked}", "task.markers": "a,an,this,that"},
}  # fmt: skip


def relations(seed, size):
    """Draws rows whose class is the topic of the first entity; of a fourth there is none."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(size):
        kind = [*TOPICS, None][i % 4]
        first = rng.choice(TOPICS[kind]) if kind else rng.choice(["very", "quite", "near"])
        others = rng.choice("the a an this that was is".split(), 4)
        words = [*others[:1], f"<e1>{first}</e1>", *others[1:3], "<e2>it</e2>", others[3]]
        rows.append({"text": " ".join(words), "label": f"is_{kind}" if kind else "none"})
    return rows


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_relations(method, backbone, tmp_path, capsys):
    test = write_splits(tmp_path, relations, train=96, dev=40, test=40)
    config = make_config(backbone, tmp_path, method, **RELATIONS | METHODS[method])
    result, workdir, lines, _ = serve(capsys, tmp_path, config, test)
    assert {"micro_f1", "precision", "recall", "accuracy"} <= result["test"].keys()
    assert accuracy(lines) == pytest.approx(result["test"]["accuracy"])
    if method == "dart":
        assert result["test"]["micro_f1"] > 0.6
    (line,), _ = predict(capsys, workdir, "--text=the <e1>cat</e1> was <e2>it</e2>")
    assert line["prediction"] in RELATIONS["task.labels"].split(",")


@pytest.mark.long
def test_dialogues_turn_by_turn(backbone, tmp_path, capsys):
    """Dev and test are read up to every turn, train as a whole."""
    turns = ["cat: it was a dog", "dog: the rice is good", "cat: an old saw"]
    pairs = [
        {"x": "cat", "y": "dog", "r": ["per:friends"], "t": ["rice"]},
        {"x": "dog", "y": "saw", "r": ["unanswerable"], "t": [""]},
    ]
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.json").write_text(json.dumps([[turns, pairs]] * 3))
    fields = {
        "task.name": "dialog_re", "task.metric": "f1c", "data.max_len": 64,
        "data.multiple": 64, "train.total_steps": 2, "train.eval_steps": 1,
    }  # fmt: skip
    config = make_config(backbone, tmp_path, "full", **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, config)
    assert {"f1c", "precision_c", "recall_c", "accuracy"} == result["test"].keys()
    record = json.loads((workdir / "record.json").read_text())
    sizes = {name: split["examples"] for name, split in record["splits"].items()}
    assert sizes == {"train": 6, "dev": 12, "test": 12}  # turns 1 to 3 of one pair, 3 of the other
    row = {"dialog": turns, **pairs[0]}
    rows = write_rows(tmp_path / "pairs.jsonl", [{"dialog": turns, **pair} for pair in pairs])
    expected, _ = predict(capsys, workdir, f"--input={rows}")
    # A line per pair, with the answer to the whole of its dialogue; train has no turns.
    for split in ("test", "train"):
        out = tmp_path / f"{split}.jsonl"
        words = (f"--workdir={workdir}", f"--split={split}", f"--output={out}")
        assert jaxprompt(capsys, "evaluate", *words)[0] == 0
        lines = read_lines(out)
        assert [x["prediction"] for x in lines] == [x["prediction"] for x in expected] * 3
        assert [x["score"] for x in lines] == pytest.approx([x["score"] for x in expected] * 3)
    rows = write_rows(tmp_path / "new.jsonl", [row, row | {"x": "goat"}])
    lines, err = predict(capsys, workdir, f"--input={rows}")
    assert len(lines) == 2 and "micro_f1" in err
    assert "entities not found as whole words in the text, and not marked: the input 1 of 2" in err


FIGURE_2_B = "dart/relations:sem_eval_2010_task_8,8,gpt2"


def test_gpt2_of_figure_2_b_says_the_relation_last(gpt2):
    """DART without a mask and without fluency."""
    config = load_config(FIGURE_2_B)
    assert len(template_ids(gpt2, config.prompt.get("text"))) == config.prompt.get("length") == 9
    assert config.prompt.get("fluency") == 0 and config.task.template == (
        "{sentence|soft} [soft*3] {entity1} [soft*1] {entity2} [soft*1] [mask]"
    )
    for task in dart_relations.TASKS:
        other = load_config(f"dart/relations:{task},8,gpt2").task.template
        assert re.sub(r"\{\w+\|soft\}", "{sentence|soft}", other) == config.task.template
    fine_tuning = load_config(f"{FIGURE_2_B}_fine_tuning")
    assert (fine_tuning.prompt.name, fine_tuning.head.name) == ("none", "linear")
    assert fine_tuning.backbone.path == config.backbone.path


def test_four_examples_per_class_are_of_events_alone():
    assert load_config("dart/relations:event_arguments,4").data.protocol.k == 4
    with pytest.raises(InputError, match="K of wiki80 '4' is unknown"):
        load_config("dart/relations:wiki80,4")


# -- facts over a list of words -------------------------------------------------------------------

CONFIG = ROOT / "configs/p_tuning/lama.py"
OUT = {"sub_label": "cat", "obj_label": "Paris", "predicate_id": "P31"}  # no word of the list


def facts(start, count):
    """Takes words of every topic; what they are is the topic's name."""
    return [
        {"sub_label": word, "obj_label": topic, "predicate_id": "P31"}
        for topic, words in TOPICS.items()
        for word in words[start : start + count]
    ]


@pytest.fixture(scope="session")
def relation(tmp_path_factory):
    """A folder of the facts of a relation and a list of words."""
    folder = tmp_path_factory.mktemp("relation")
    write_rows(folder / "train.jsonl", [*facts(0, 6), OUT])
    write_rows(folder / "dev.jsonl", facts(6, 2))
    write_rows(folder / "test.jsonl", [OUT, *facts(8, 4)])
    (folder / "words.txt").write_text("\n".join([*WORDS, "Beast", "nowhere", "☃"]) + "\n")
    return folder


@pytest.fixture
def fields_of_run(backbone, relation):
    return {
        "backbone.path": backbone, "data.source": relation, "mesh.data": 1, "prompt.hidden": 16,
        "task.vocabulary": relation / "words.txt", "data.max_len": 24, "data.multiple": 24,
        "train.tracker": "none", "train.plot": False,
    }  # fmt: skip


@pytest.mark.long
def test_a_relation_is_learned(fields_of_run, tmp_path, capsys):
    """Predictions are ranked over the list; a row whose object is no word of it is left out."""
    fields = fields_of_run | {
        "prompt.encoder": "none", "prompt.scale": 0.1, "optim.lr": 3e-2,
        "optim.schedule.gamma": 1.0,
        "train.total_epochs": 0, "train.total_steps": 60, "train.eval_steps": 60,
        "train.eval_epochs": 0,
    }  # fmt: skip
    run = f"--workdir={tmp_path / 'run'}"
    out, err = succeed(capsys, "train", f"--config={CONFIG}", run, *flags(fields))
    listed = len({*WORDS, "Beast", "nowhere", "☃"})
    assert f"{listed - 3} classes of {listed} words; 2 are not one token and left out, 1 are" in err
    assert "examples left out, whose obj_label is no class: train 1 of 19, dev 0 of 6" in err
    test = json.loads(out)["test"]
    assert [*test] == ["hit_at_1", "hit_at_10", "mrr", "other_words"]
    assert test["hit_at_1"] <= test["mrr"]
    assert test["hit_at_10"] > 0.8  # by chance 10 of some 60 words
    output = tmp_path / "output.jsonl"
    at = f"--config={tmp_path / 'run/config.json'}", run, "--split=test"
    out, _ = succeed(capsys, "evaluate", *at, f"--output={output}")
    lines = read_lines(output)
    right = [line["prediction"] == line["obj_label"] for line in lines]
    assert len(lines) == 12 and np.mean(right) == test["hit_at_1"]
    assert json.loads(out)["mrr"] == pytest.approx(test["mrr"])
    out, _ = succeed(capsys, "evaluate", *at, "--majority")
    assert json.loads(out)["hit_at_1"] == pytest.approx(1 / 3)
    assert json.loads(out)["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.long
def test_each_relation_of_one_file_has_a_run_and_a_row_their_mean(
    fields_of_run, relation, tmp_path, capsys
):
    """Of files with two relations the rows of one are read; what they share in a table is a row."""
    other = "P36"
    for split in ("train", "dev", "test"):
        rows = read_lines(relation / f"{split}.jsonl")
        turned = [row | {"obj_label": "tool", "predicate_id": other} for row in rows[:5]]
        mixed = [row for pair in zip(rows, turned, strict=False) for row in pair] + rows[5:]
        write_rows(tmp_path / f"{split}.jsonl", mixed)
    fields = fields_of_run | {
        "data.source": tmp_path, "prompt.encoder": "none", "optim.lr": 3e-2,
        "train.total_epochs": 0, "train.total_steps": 4, "train.eval_steps": 2,
        "train.eval_epochs": 0,
    }  # fmt: skip
    scores = []
    for name, size in (("P31", 18), (other, 5)):
        run = tmp_path / "runs" / name
        config = f"--config={CONFIG}:masked,predicate_id={name}"
        out, err = succeed(capsys, "train", config, f"--workdir={run}", *flags(fields))
        assert f"train {size}, dev " in err
        scores.append(json.loads(out)["test"]["hit_at_1"])
        output = tmp_path / f"{name}.jsonl"
        at = (f"--config={run / 'config.json'}", f"--workdir={run}", "--split=test")
        assert jaxprompt(capsys, "evaluate", *at, f"--output={output}")[0] == 0
        assert {line["predicate_id"] for line in read_lines(output)} == {name}
    out, _ = succeed(capsys, "sweep", f"--table={tmp_path / 'runs'}")
    _, _, row = out.splitlines()
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:3] == ["p_tuning", "2", "34"]
    assert cells[7] == f"{np.mean(scores):.3f} ± {np.std(scores):.3f}"


def test_columns_may_have_other_names():
    config = load_config(f"{CONFIG}:causal,subject,object")
    assert (config.task.fields, config.task.label) == (("subject",), "object")


def test_the_sweep_has_a_row_per_model(tmp_path):
    runs = list_runs(str(CONFIG), str(tmp_path))
    assert len(runs) == 2 * 41 and {run.row for run in runs} == {"masked", "causal"}
    assert len({run.workdir for run in runs}) == len(runs)


def test_each_relation_is_chosen_for_by_itself():
    """Of one seed the learning rate that is best on dev, for each relation."""
    dev = {("a", 1): 0.9, ("a", 2): 0.2, ("b", 1): 0.1, ("b", 2): 0.3}
    runs = [
        (
            {"seed": 34, "optim.lr": lr, "data.only": f"r={name}"},
            RunResult(best_step=1, dev={"hit_at_1": x}),
        )
        for (name, lr), x in dev.items()
    ]
    chosen = [runs[i] for i in select_best_runs(runs)]
    scores = [(changes["data.only"], result.dev["hit_at_1"]) for changes, result in chosen]
    assert scores == [("r=a", 0.9), ("r=b", 0.3)]


@pytest.mark.parametrize(
    "config, fields, message",
    [
        ("masked", {"task.labels": "a,b"}, "task.labels=('a', 'b') defines others"),
        ("masked", {"task.name": "topics"}, "task.name='topics' defines others"),
        ("masked,predicate_id=P3", {}, "data.only=predicate_id=P3; nearest: P31"),
        ("masked,relation=P31", {}, "column 'relation', which data.only names; columns: "),
        ("masked", {"data.only": "P31"}, "data.only='P31' must be COLUMN=VALUE"),
        ("masked,subject", {}, "must be MODEL or MODEL,SUBJECT,OBJECT"),
        ("both", {}, "the model 'both' is unknown; known: causal, masked"),
    ],
)
def test_configs_that_are_refused(config, fields, message, fields_of_run, refused):
    words = [f"--config={CONFIG}:{config}", *flags(fields_of_run | fields)]
    assert message in refused("validate", *words)
