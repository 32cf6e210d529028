"""Metrics of relations against their official definitions, stated here independently."""

import dataclasses
import gzip
import json

import numpy as np
import pytest
from official_semeval import official_semeval
from sklearn.metrics import f1_score

from jaxprompt.data.tasks.readers.dialogues import read_turns
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.encoded import MetricData
from jaxprompt.errors import InputError
from jaxprompt.scoring import metrics
from jaxprompt.scoring.relations import check_relations, collect_facts

SEMEVAL = get_task("sem_eval_2010_task_8")
OTHER = SEMEVAL.labels.index("Other")


def metric_data(gold, names=SEMEVAL.labels, negative="Other"):
    task = Task("x", ("text",), labels=tuple(names), negative=negative)
    return collect_facts(task, [Example({}, label=int(g)) for g in gold])


def real_labels(shared):
    path = shared / "data/sem_eval_2010_task_8/test.jsonl.gz"
    return np.array([json.loads(line)["relation"] for line in gzip.open(path)])


def simulate(gold, seed, wrong, turned):
    """Answers of which a share is drawn from all classes, and a share has the wrong direction."""
    rng = np.random.default_rng(seed)
    pred, chance = gold.copy(), rng.random(len(gold))
    is_wrong = chance < wrong
    pred[is_wrong] = rng.integers(0, 19, is_wrong.sum())
    turns = (chance > 1 - turned) & (gold != OTHER)
    pred[turns] = gold[turns] ^ 1  # (e1,e2) and (e2,e1) stand side by side
    return pred


@pytest.mark.parametrize("wrong, turned", [
    (0.0, 0.0), (0.3, 0.0), (0.0, 0.4), (0.25, 0.25), (1.0, 0.0), (0.0, 1.0), (0.6, 0.1)
])  # fmt: skip
def test_semeval_is_the_official_score(shared, wrong, turned):
    gold = real_labels(shared)
    for seed in range(3):
        pred = simulate(gold, seed, wrong, turned)
        scores = metrics.score_predictions("semeval_f1", gold, pred, metric_data(gold))
        names = ([SEMEVAL.labels[i] for i in indices] for indices in (gold, pred))
        assert 100 * scores["semeval_f1"] == pytest.approx(official_semeval(*names), abs=1e-9)
        assert scores["accuracy"] == pytest.approx(np.mean(gold == pred))
        assert next(iter(scores)) == "semeval_f1"


def test_semeval_on_few_answers():
    """One relation, of which one answer is turned around: P = R = 1/2; none of Other counts."""
    name = SEMEVAL.labels.index
    gold = [name("Cause-Effect(e1,e2)"), name("Cause-Effect(e1,e2)"), OTHER, OTHER]
    pred = [name("Cause-Effect(e1,e2)"), name("Cause-Effect(e2,e1)"), OTHER, -1]
    scores = metrics.score_predictions("semeval_f1", gold, pred, metric_data(gold))
    assert scores["semeval_f1"] == pytest.approx(0.5)
    assert scores["micro_f1"] == pytest.approx(0.5) and scores["accuracy"] == 0.5
    none = metrics.score_predictions(
        "semeval_f1", [OTHER, OTHER], pred[:2], metric_data([OTHER, OTHER])
    )
    assert none["semeval_f1"] == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_micro_f1_is_that_of_scikit_learn_without_the_negative_class(seed):
    rng = np.random.default_rng(seed)
    gold, pred = rng.integers(0, 7, 300), rng.integers(0, 7, 300)
    gold[rng.random(300) < 0.5] = pred[rng.random(300) < 0.3] = 3
    names = list("abcdefg")
    scores = metrics.score_predictions("micro_f1", gold, pred, metric_data(gold, names, "d"))
    there = [0, 1, 2, 4, 5, 6]
    assert scores["micro_f1"] == pytest.approx(f1_score(gold, pred, labels=there, average="micro"))
    without = metrics.score_predictions("micro_f1", gold, pred, metric_data(gold, names, ""))
    assert without["micro_f1"] == pytest.approx(np.mean(gold == pred)) == without["accuracy"]


def test_micro_f1_without_an_answer():
    """Nothing is said of any relation: precision 1, as TACRED's scorer has it, and F1 0."""
    gold = [0, 0, 1]
    scores = metrics.score_predictions(
        "micro_f1", gold, [1, 1, -1], metric_data(gold, ["is", "none"], "none")
    )
    assert scores == {"micro_f1": 0.0, "precision": 1.0, "recall": 0.0, "accuracy": 0.0}
    gold = [1, 1]
    scores = metrics.score_predictions(
        "micro_f1", gold, [0, 1], metric_data(gold, ["is", "none"], "none")
    )
    assert (scores["precision"], scores["recall"], scores["micro_f1"]) == (0.0, 0.0, 0.0)


# -- dialogues: (turns, [(x, y, {relation: trigger}), ...]); 9 stands for unanswerable -------------

DIALOGUES = [
    (["A: hey", "B: my love, hi", "A: boss"], [
        ("A", "B", {1: "love", 2: ""}), ("B", "hey", {9: ""}), ("A", "never", {3: "boss"}),
    ]),
    (["C: x"], [("C", "x", {4: ""})]),
    (["A: one", "B: two", "C: three", "A: four"], [
        ("A", "C", {5: "one", 6: "four"}), ("B", "A", {9: ""}), ("C", "B", {1: "absent"}),
    ]),
]  # fmt: skip
NULL = 9


def official_f1(said):
    """F1 over all pairs of entities (Yu et al. 2020, section 4.2). said: a relation or 9 a pair"""
    every = [relations for _, pairs in DIALOGUES for *_, relations in pairs]
    hits = sum(p in relations and p != NULL for p, relations in zip(said, every, strict=True))
    all_said = sum(p != NULL for p in said)
    wanted = sum(name != NULL for relations in every for name in relations)
    p, r = hits / all_said if all_said else 1, hits / wanted if wanted else 0
    return 2 * p * r / (p + r) if p + r else 0


def official_f1c(said):
    """The same in conversations: `said` has an answer for every turn of every pair.

    Evaluable at a turn, once both were named, are the relations that are not right, and those that
    are from the turn of their trigger on; at the last turn all.
    """
    answers, precisions, recalls = iter(said), [], []
    for turns, pairs in DIALOGUES:
        for x, y, relations in pairs:
            right = {name for name in relations if name != NULL}
            hits = all_said = wanted = 0
            for number in range(1, len(turns) + 1):
                heard, last = [turn.lower() for turn in turns[:number]], number == len(turns)
                named = all(any(e.lower() in turn for turn in heard) for e in (x, y)) or last
                stated = {
                    name for name in right
                    if last or (relations[name] and any(relations[name] in turn for turn in heard))
                }  # fmt: skip
                evaluable = {n for n in range(NULL) if named and (n not in right or n in stated)}
                answer = {next(answers)} - {NULL}
                hits += len(answer & right & evaluable)
                all_said += len(answer & evaluable)
                wanted += len(right & evaluable)
            precisions.append(hits / all_said if all_said else 1)
            recalls.append(hits / wanted if wanted else 0)
    p, r = np.mean(precisions), np.mean(recalls)
    return 2 * p * r / (p + r) if p + r else 0


def turns_and_examples(by_turn):
    """Reads DIALOGUES as a task does. -> examples, and for each the place of its answer."""
    task = custom_task(
        fields=("dialog",), label="r", labels=[str(n) for n in range(10)], entities=("x", "y"),
        offsets="text", negative="9",
    )  # fmt: skip
    task = dataclasses.replace(task, lines=("dialog",))
    examples, places, at, pair = [], [], 0, 0
    for turns, pairs in DIALOGUES:
        for x, y, relations in pairs:
            row = {"dialog": turns, "x": x, "y": y}
            row |= {"r": [str(name) for name in relations], "t": list(relations.values())}
            whole = read_example(task, row, "x:1")
            actual = list(read_turns(task, row, whole, "x:1", pair)) if by_turn else [whole]
            lengths = [one.fields["dialog"].count("\n") for one in actual]
            examples += actual
            places += [at + n for n in lengths] if by_turn else [pair]
            at, pair = at + len(turns), pair + 1
    return task, examples, places


@pytest.mark.parametrize("seed", range(6))
def test_f1_and_f1c_are_those_of_dialogre(seed):
    rng = np.random.default_rng(seed)
    for by_turn, official, name in ((False, official_f1, "micro_f1"), (True, official_f1c, "f1c")):
        task, examples, places = turns_and_examples(by_turn)
        total = sum((len(turns) if by_turn else 1) * len(pairs) for turns, pairs in DIALOGUES)
        said = rng.integers(0, 10, total)
        right = rng.random(total) < 0.6  # of these the first right relation is said
        every = []
        for turns, pairs in DIALOGUES:
            for *_, classes in pairs:
                every += [next(iter(classes))] * (len(turns) if by_turn else 1)
        said = np.where(right, every, said)
        facts = collect_facts(task, examples)
        gold = [one.label for one in examples]
        scores = metrics.score_predictions(name, gold, said[places], facts)
        assert scores[name] == pytest.approx(official(said.tolist()), abs=1e-12)
        assert next(iter(scores)) == name


def test_f1c_needs_turns_of_a_pair_not_several_pairs():
    """`pairs` are numbered from 0; -1 is a whole dialogue."""
    gold = np.array([1, 1])
    facts = metrics.MetricData(("none", "r"), 0, ((1,), (1,)), ((), (1,)), pairs=(0, 0))
    assert next(iter(metrics.score_predictions("f1c", gold, gold, facts))) == "f1c"


def test_f1c_of_whole_dialogues_is_f1():
    task, examples, _ = turns_and_examples(False)
    facts, gold = collect_facts(task, examples), [e.label for e in examples]
    assert "micro_f1" in metrics.score_predictions("f1c", gold, gold, facts)


def test_taking_some_of_what_is_known():
    facts = MetricData(("a", "b"), 1, [(0,), (1,)], [(), (1,)], [0, 1], candidates=["x", "y"])
    expected = MetricData(("a", "b"), 1, [(1,)], [(1,)], [1], 0, [], ["y"])
    assert facts.select([False, True]) == expected


def test_classes_that_semeval_does_not_have():
    check_relations("semeval_f1", SEMEVAL.labels, "Other")
    check_relations("micro_f1", ("a", "b"), "")
    with pytest.raises(InputError, match="not 'b'; use micro_f1"):
        check_relations("semeval_f1", ("R(e1,e2)", "b", "Other"), "Other")
    with pytest.raises(InputError, match="task.negative"):
        check_relations("semeval_f1", SEMEVAL.labels[:-1], "")
