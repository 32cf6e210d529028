"""Semantic roles from a config alone: files of CoNLL, a tiny model, its metric and its answers."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import FILLERS, TOPICS, jaxprompt, make_config, read_lines, train_and_export

sys.path.insert(0, str(Path(__file__).parents[1] / "scoring"))
from srl_eval import f1_of, official  # noqa: E402

OWN = {
    "head.name": "tags", "task.name": "conll05", "backbone.dropout": 0, "prompt.dropout": 0,
    "optim.lr": 3e-2, "train.total_steps": 60, "train.eval_steps": 30, "data.max_len": 24,
    "head.decode": "viterbi",
}  # fmt: skip


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
            own = [*fillers, pick("beast"), pick("beast"), pick("food"), pick("tool"), pick("food")]
            shared = ["*"] * len(fillers) + ["(A1*", "*)"]
            roles = [*shared, "(A0*)", "(V*)", "(C-A0*)"]
            words += own
            verbs += [word if word in TOPICS["tool"] else "-" for word in own]
            for column in range(2):
                columns[column] += roles if column == verb else [*shared, "*", "*", "*"]
        lines += [" ".join(cells) for cells in zip(words, verbs, *columns, strict=True)] + [""]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    for seed, (name, size) in enumerate({"train": 16, "dev": 4, "test": 6}.items()):
        (folder / f"{name}.props").write_text(props(seed, size))
    return folder


def test_a_line_per_predicate_with_its_roles(backbone, folder, tmp_path, capsys):
    c = make_config(backbone, folder, "prefix", **OWN, **{"task.markers": "a,a"})
    result, workdir, told = train_and_export(capsys, tmp_path, c)
    assert list(result["test"]) == ["role_f1", "precision", "recall", "accuracy", "entity_f1"]
    assert "roles in train: A0 32, A1 64, C-A0 32, V 32; 2 texts are split into windows" in told
    assert "train 32, dev 8, test 12" in told and result["dev"]["role_f1"] > 0.1
    card = json.loads((workdir / "export/prompt.json").read_text())
    assert card["template"] == "{tokens|marked} [sep] {predicate}"
    out = tmp_path / "found.jsonl"
    given = [f"--workdir={workdir}", f"--input={folder / 'test.props'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *given)
    assert code == 0, err
    lines = read_lines(out)
    assert len(lines) == 12
    for line in lines:
        text, place = " ".join(line["tokens"]), line["predicate_span"]
        assert place["word"] == line["predicate"] and "entities" not in line
        assert text[place["start"] : place["end"]] == line["tokens"][line["predicate"]]
        assert all(text[r["start"] : r["end"]] == r["text"] for r in line["roles"])
        befores = ["O", *line["prediction"]]
        for old, tag in zip(befores, line["prediction"], strict=False):
            assert tag[0] != "I" or (old[0] in "BI" and old[2:] == tag[2:])  # IOB2
    found = f1_of(*official([line["tags"] for line in lines], [x["prediction"] for x in lines]))
    assert found == pytest.approx({name: result["test"][name] for name in found})
    assert found["role_f1"] > 0.1
    words = [f"--config={tmp_path / 'config.json'}", f"--workdir={workdir}", "--split=test"]
    for decode, least in (("viterbi", found["role_f1"]), ("argmax", 0)):
        code, out, err = jaxprompt(capsys, "evaluate", *words, f"--config.head.decode={decode}")
        assert code == 0 and json.loads(out)["role_f1"] >= least - 1e-6, err


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"task.template": "{tokens} [sep] {predicate}", "task.markers": "a,a"},
         "does not say where; write {tokens|marked}"),
        ({"task.labels": "A0,V"}, "tag 'B-A1' is not one of task conll05: O, B-A0, I-A0, B-V, I-V"),
        ({"task.name": "conll04"}, "set task.predicate to the column"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(fields, told, backbone, folder, tmp_path, capsys):
    c = make_config(backbone, folder, "prefix", **OWN | fields)
    (tmp_path / "c.json").write_text(c.to_json())
    code, _, err = jaxprompt(capsys, "validate", f"--config={tmp_path / 'c.json'}")
    assert code == 2 and told in err, err
