"""Relations between marked entities, from files to predictions."""

import gzip
import json
import re

import numpy as np
import pytest
from official_semeval import official_semeval
from tiny_run import (
    TOPICS,
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    train_and_export,
    write_rows,
)

from configs.dart import relations as dart_relations
from jaxprompt.config.load import load_config, with_overrides
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.data.text.words import template_ids
from jaxprompt.errors import InputError
from jaxprompt.runs.train import train_prompt

ROWS = "{text|soft} {entity1} [soft*2] [mask] [soft*1] {entity2}"
TEXT = "a a an an is the near"  # words that the tiny vocabulary has
FIELDS = {
    "task.fields": "text", "task.entities": "<e1>|</e1>,<e2>|</e2>", "task.negative": "none",
    "task.metric": "micro_f1", "task.words": "beast,food,tool,it", "data.max_len": 40,
    "task.labels": "is_beast,is_food,is_tool,none",
    "data.multiple": 40, "train.total_steps": 40, "train.eval_steps": 20,
}  # fmt: skip


def relations(seed, size):
    """Draws rows whose class is the topic of the first entity; of a fourth there is none."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(size):
        kinds = [*TOPICS, None]
        kind = kinds[i % 4]
        first = rng.choice(TOPICS[kind]) if kind else rng.choice(["very", "quite", "near"])
        others = rng.choice("the a an this that was is".split(), 4)
        words = [*others[:1], f"<e1>{first}</e1>", *others[1:3], "<e2>it</e2>", others[3]]
        label = f"is_{kind}" if kind else "none"
        rows.append({"text": " ".join(words), "label": label})
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relations")
    for seed, (name, size) in enumerate({"train": 96, "dev": 40, "test": 40}.items()):
        write_rows(folder / f"{name}.jsonl", relations(seed, size))
    return folder


def predict(capsys, workdir, *words):
    code, out, err = jaxprompt(capsys, "predict", f"--workdir={workdir}", *words)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()], err


def dart(**fields):
    return {
        "task.template": ROWS, "prompt.length": 7, "prompt.text": TEXT, "prompt.fluency": 0.2,
        "optim.lr": 1e-3,
    } | fields  # fmt: skip


METHODS = {
    "dart": dart(),
    "full": {"optim.lr": 1e-3},
    "soft": {"head.name": "verbalizer", "task.template": "{text|soft} [mask]", "optim.lr": 0.1},
    "prefix": {"task.template": "{text|marked}", "task.markers": "a,an,this,that"},
}


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_methods_learn_and_predict(method, backbone, files, tmp_path, capsys):
    c = make_config(backbone, files, method, **FIELDS | METHODS[method])
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert {"micro_f1", "precision", "recall", "accuracy"} <= result["test"].keys()
    given = [row["text"] for row in read_lines(files / "test.jsonl")]
    lines, err = predict(capsys, workdir, f"--input={files / 'test.jsonl'}")
    assert [line["text"] for line in lines] == given
    assert f"micro_f1 {result['test']['micro_f1']:.4f}" in err
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert right == pytest.approx(result["test"]["accuracy"])
    if method in ("dart", "full"):
        assert result["test"]["micro_f1"] > 0.6
    (line,), _ = predict(capsys, workdir, "--text=the <e1>cat</e1> was <e2>it</e2>")
    assert line["prediction"] in ("is_beast", "is_food", "is_tool", "none")


@pytest.mark.long
def test_rows_around_entities_move_and_nothing_of_the_vocabulary(backbone, files, tmp_path, capsys):
    """On a frozen backbone seven rows, four labels and their biases train, and all of them move."""
    from safetensors.numpy import load_file

    own = {"trainable": "prompt/.*,head/.*", "train.total_steps": 4, "train.eval_steps": 4}
    c = make_config(backbone, files, "dart", **FIELDS | dart() | own)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert result["trained"] == (7 + 4) * 32 + 4
    held = load_file(workdir / "export/prompt.safetensors")
    table = load_file(backbone / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    rows = held["prompt/slots"]
    assert rows.shape == (7, 32)
    gaps = np.abs(table[None] - rows[:, None]).max(-1).min(-1)
    assert (gaps > 1e-5).all() and (gaps < 0.2).all()  # each near the word that it was a copy of


@pytest.mark.long
@pytest.mark.parametrize("family, template, slots, text", [
    ("t5", "{text|soft} {entity1} [soft*2] [mask] {entity2}", 6, "a a an an is the"),
    ("gpt2", "{text|soft} {entity1} {entity2} [mask]", 4, "a a an an"),
    ("roberta", ROWS, 7, TEXT),
], ids=["t5", "gpt2", "roberta"])  # fmt: skip
def test_other_backbones(family, template, slots, text, files, tmp_path, capsys):
    folder = make_backbone(tmp_path / family, family)
    own = dart() | {
        "task.template": template, "prompt.length": slots, "prompt.text": text,
        "prompt.fluency": 0.0, "train.total_steps": 2, "train.eval_steps": 2, "data.max_len": 64,
        "data.multiple": 64,
    }  # fmt: skip
    result, workdir, _ = train_and_export(
        capsys, tmp_path, make_config(folder, files, "dart", **FIELDS | own)
    )
    lines, _ = predict(capsys, workdir, f"--input={files / 'test.jsonl'}")
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert right == pytest.approx(result["test"]["accuracy"])


def test_validate_shows_the_rows_and_cut_texts(backbone, files, tmp_path, capsys):
    c = make_config(backbone, files, "dart", **FIELDS | dart() | {"data.max_len": 24})
    (tmp_path / "c.json").write_text(c.to_json())
    code, out, err = jaxprompt(capsys, "validate", f"--config={tmp_path / 'c.json'}")
    assert code == 0, err
    first = next(line for line in out.splitlines() if "the first example" in line)
    assert first.count("[soft]") == 7 and "the config is valid" in out
    assert "texts cut to 24 tokens: train" in out


# -- SemEval's own sentences ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def semeval(shared, tmp_path_factory):
    """A few hundred real sentences."""
    folder, found = tmp_path_factory.mktemp("semeval"), {}
    for split, start, size in (("train", 0, 360), ("dev", 360, 40), ("test", 400, 60)):
        source = shared / "data/sem_eval_2010_task_8/train.jsonl.gz"
        found.setdefault("rows", [json.loads(line) for line in gzip.open(source)])
        write_rows(folder / f"{split}.jsonl", found["rows"][start : start + size])
    return folder


FIGURE_2_B = "dart/relations:sem_eval_2010_task_8,8,gpt2"


def test_gpt2_of_figure_2_b_says_the_relation_last(gpt2):
    """DART without a mask and without fluency."""
    c = load_config(FIGURE_2_B)
    assert len(template_ids(gpt2, c.prompt.get("text"))) == c.prompt.get("length") == 9
    assert c.prompt.get("fluency") == 0 and c.task.template == (
        "{sentence|soft} [soft*3] {entity1} [soft*1] {entity2} [soft*1] [mask]"
    )
    for task in dart_relations.TASKS:
        other = load_config(f"dart/relations:{task},8,gpt2").task.template
        assert re.sub(r"\{\w+\|soft\}", "{sentence|soft}", other) == c.task.template


@pytest.mark.long
def test_gpt2_of_figure_2_b_trains(semeval, tmp_path):
    c = load_config(FIGURE_2_B)
    changes = {
        "backbone.path": str(make_backbone(tmp_path / "gpt2", "gpt2")),
        "data.source": str(semeval), "data.protocol.k": 1, "data.max_len": 64, "data.batch": 16,
        "prompt.text": "a a an an the it is an this", "train.total_steps": 2,
        "train.total_epochs": 0, "train.eval_steps": 1, "optim.schedule.warmup_ratio": 0.0,
        "optim.schedule.warmup_steps": 1,
    }  # fmt: skip
    result = train_prompt(with_overrides(c, list(changes.items())), str(tmp_path / "run")).to_json()
    assert result["trained"] == result["total"]
    assert next(iter(result["test"])) == "micro_f1"  # which table 2 reports selects


def test_fine_tuning_of_figure_2_b_reads_the_same_words():
    c = load_config(f"{FIGURE_2_B}_fine_tuning")
    assert (c.prompt.name, c.head.name) == ("none", "linear")
    assert c.backbone.path == load_config(FIGURE_2_B).backbone.path


def test_four_examples_per_class_are_of_events_alone():
    assert load_config("dart/relations:event_arguments,4").data.protocol.k == 4
    with pytest.raises(InputError, match="number of examples per class '4' is unknown"):
        load_config("dart/relations:wiki80,4")


@pytest.mark.long
@pytest.mark.parametrize("method", ["dart", "full"])
def test_semeval_by_its_name(method, backbone, semeval, tmp_path, capsys):
    """The scores of what a run answers are the official ones."""
    fields = {
        "task.name": "sem_eval_2010_task_8", "data.max_len": 64,
        "data.multiple": 64, "train.total_steps": 200, "train.eval_steps": 200,
        "optim.lr": 3e-3, "optim.schedule": "constant",
    }  # fmt: skip
    if method == "dart":
        # A long entity takes many of the tiny vocabulary's letters, so it is not named again.
        fields |= dart() | {"task.template": "{sentence|soft} [soft*2] [mask] [soft*1]"}
        fields |= {"train.total_steps": 6, "train.eval_steps": 3}
    result, workdir, _ = train_and_export(
        capsys, tmp_path, make_config(backbone, semeval, method, **fields)
    )
    assert next(iter(result["test"])) == "semeval_f1"
    lines, err = predict(capsys, workdir, f"--input={semeval / 'test.jsonl'}")
    assert f"semeval_f1 {result['test']['semeval_f1']:.4f}" in err and "texts cut to 64" in err
    assert set(lines[0]["scores"]) >= {"Cause-Effect(e1,e2)", "Other"} and len(lines) == 60
    if method == "full":  # which fits some of what it has read
        lines, err = predict(capsys, workdir, f"--input={semeval / 'train.jsonl'}")
    labels = get_task("sem_eval_2010_task_8").labels
    gold = [labels[line["relation"]] for line in lines]
    official = official_semeval(gold, [line["prediction"] for line in lines]) / 100
    assert f"semeval_f1 {official:.4f} " in err.replace(",", " ")
    assert method == "dart" or len({line["prediction"] for line in lines}) > 2 and official > 0.02


@pytest.mark.long
def test_arguments_of_events(backbone, tmp_path, capsys):
    """A row of the data holds an event with all its arguments: each is answered."""
    rng = np.random.default_rng(0)
    roles = {"beast": "Attacker", "food": "Artifact", "tool": "Instrument"}

    def event():
        kinds = rng.permutation(list(TOPICS))[:2]
        words = [str(rng.choice(TOPICS[kind])) for kind in kinds]
        spans = ([0, 1], {"start": 3, "end": 4})
        return {
            "tokens": [words[0], "was", "near", words[1], "."], "trigger": [1, 2],
            "arguments": [
                {"argument": span, "role": roles[kind]}
                for span, kind in zip(spans, kinds, strict=True)
            ],
        }  # fmt: skip

    for name, size in {"train": 64, "dev": 16, "test": 16}.items():
        write_rows(tmp_path / f"{name}.jsonl", [event() for _ in range(size)])
    fields = {
        "task.name": "event_arguments", "data.max_len": 48,
        "data.multiple": 48, "train.total_steps": 40, "train.eval_steps": 20, "optim.lr": 3e-3,
        "task.template": "{tokens|marked} [mask] {entity2}", "task.markers": "a,an,the,this",
    }  # fmt: skip
    result, workdir, _ = train_and_export(
        capsys, tmp_path, make_config(backbone, tmp_path, "full", **fields)
    )
    assert next(iter(result["test"])) == "micro_f1" and result["test"]["micro_f1"] > 0.6
    lines, err = predict(capsys, workdir, f"--input={tmp_path / 'test.jsonl'}")
    assert f"micro_f1 {result['test']['micro_f1']:.4f}" in err and len(lines) == 32
    right = np.mean([line["prediction"] == line["role"] for line in lines])
    assert right == pytest.approx(result["test"]["accuracy"])


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
    c = make_config(backbone, tmp_path, "full", **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert {"f1c", "precision_c", "recall_c", "accuracy"} == result["test"].keys()
    record = json.loads((workdir / "record.json").read_text())
    sizes = {name: split["examples"] for name, split in record["splits"].items()}
    assert sizes == {"train": 6, "dev": 12, "test": 12}  # turns 1 to 3 of one pair, 3 of the other
    # Written is a line per pair, with the answer to the whole of its dialogue, as `predict` has it.
    out = tmp_path / "out.jsonl"
    place = (f"--workdir={workdir}", "--split=test", f"--output={out}")
    code, _, err = jaxprompt(capsys, "evaluate", *place)
    assert code == 0, err
    written = [json.loads(line) for line in out.read_text().splitlines()]
    given = write_rows(tmp_path / "pairs.jsonl", [{"dialog": turns, **pair} for pair in pairs])
    expected, _ = predict(capsys, workdir, f"--input={given}")
    assert [x["score"] for x in written] == pytest.approx([x["score"] for x in expected] * 3)
    assert [x["prediction"] for x in written] == [x["prediction"] for x in expected] * 3
    # Train has no turns, and a line per pair as well.
    place = (f"--workdir={workdir}", "--split=train", f"--output={out}")
    assert jaxprompt(capsys, "evaluate", *place)[0] == 0
    trained = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
    assert trained == [x["prediction"] for x in expected] * 3
    row = {"dialog": turns, **pairs[0]}
    given = write_rows(tmp_path / "new.jsonl", [row, row | {"x": "goat"}])
    lines, err = predict(capsys, workdir, f"--input={given}")
    assert len(lines) == 2 and "micro_f1" in err
    assert "entities not found as whole words in the text, and not marked: the input 1 of 2" in err


# -- refused --------------------------------------------------------------------------------------


def test_what_a_run_refuses(train, files, tmp_path):
    given = {name.replace(".", "__"): value for name, value in FIELDS.items()}
    given |= {"data__source": files}
    line = train(**given | {"task__negative": "NA"})
    assert "task.negative='NA' is not a class of task custom" in line
    line = train(**given | {"task__metric": "semeval_f1"})
    assert "metric semeval_f1 needs classes like Cause-Effect(e1,e2)" in line
    line = train(**given | {"task__template": "{text|soft}"})
    assert "puts 4 soft tokens around 2 entities, but the method has only 0 slots" in line
    line = train(**given | {"task__entities": "", "task__template": "{text|marked}"})
    assert "marks the entities of 'text'" in line
    rows = read_lines(files / "train.jsonl")
    write_rows(tmp_path / "train.jsonl", [*rows[:5], {"text": "no <e1>tags</e1>", "label": "none"}])
    line = train(**given | {"data__source": "", "data__files__train": tmp_path / "train.jsonl"})
    assert line.startswith(
        f"{tmp_path / 'train.jsonl'}:6: column 'text' must contain <e2> of entity 2"
    )


def test_offsets_of_a_csv(train, backbone, tmp_path, capsys):
    (tmp_path / "train.csv").write_text(
        "text,a,b,c,d,label\n" + "the cat was near it,4,7,17,19,x\nit is a saw,0,2,8,11,y\n" * 4
        + "it is a saw,0,2,8,12,y\n"
    )  # fmt: skip
    fields = {
        "task__entities": "a|b,c|d", "task__offsets": "characters", "data__source": "",
        "data__files__train": tmp_path / "train.csv", "data__protocol": "holdout",
        "data__protocol__size": 2,
    }  # fmt: skip
    line = train(**fields)
    assert (
        f"{tmp_path / 'train.csv'}:10: entity 2 is characters 8 to 12, but the text has 11" in line
    )
