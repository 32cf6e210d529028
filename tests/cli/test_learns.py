"""Every method and baseline learns a tiny task through the command line's own function."""

import json
import struct

import numpy as np
import pytest
from tiny_run import (
    LAYERS,
    TOPICS,
    WIDTH,
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    split_scores,
)

from jaxprompt.runs.train import train_prompt
from jaxprompt.scoring.decisions import probabilities

STILL = dict(backbone__dropout=0, head__dropout=0)  # without dropout a step compiles faster
LONG = STILL | dict(train__total_steps=60, train__eval_steps=60, train__log_steps=1)
LM = {"head.name": "verbalizer", "task.words": "beast,food,tool"}
MASKED = LM | {"task.template": "{text} about [mask] ."}
CASES = {
    "prefix": ("prefix", dict(prompt__dropout=0), 3e-2),
    "prefix_mlp": ("prefix", dict(prompt__dropout=0, prompt__hidden=8), 1e-2),
    "prefix_interval": ("prefix", dict(prompt__dropout=0, prompt__layers="2-2"), 3e-2),
    "soft_middle": ("soft", dict(task__template="[soft*2] {text} [soft*2] ."), 3e-2),
    "soft_normal": ("soft", dict(prompt__start="normal"), 3e-2),
    "soft_labels": ("soft", dict(prompt__start="labels"), 3e-2),
    "soft_text": ("soft", dict(prompt__start="text", prompt__text="it was about the"), 3e-2),
    "soft_task": ("soft", dict(prompt__start="task"), 3e-2),
    "head_only": ("head_only", {}, 3e-2),
    "full": ("full", {}, 3e-3),
    "full_verbalizer": ("full", MASKED, 3e-3),
    "soft_verbalizer": ("soft", LM | {"task.template": "{text} [soft] [mask] ."}, 1e-1),
    "hybrid": ("soft", LM | {"task.template": "[soft] {text} about [mask] ."}, 1e-1),
    "prefix_verbalizer": ("prefix", MASKED | dict(prompt__dropout=0), 3e-2),
    "bias_only": ("bias_only", {}, 1e-2),
    "layernorm_only": ("layernorm_only", {}, 1e-2),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_learns(case, backbone, data, tmp_path):
    method, fields, rate = CASES[case]
    c = make_config(backbone, data, method, **LONG, **fields, optim__lr=rate)
    result = train_prompt(c, str(tmp_path)).to_json()
    losses = [r["loss"] for r in read_lines(tmp_path / "metrics.jsonl") if "loss" in r]
    assert len(losses) == 60
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:3]), (losses[:3], losses[-5:])
    # Three classes, 30 rows: chance passes 0.8 once in ten million draws.
    assert result["dev"]["accuracy"] >= 0.8 and result["test"]["accuracy"] >= 0.75
    assert result["skipped"] == 0 and result["method"] == c.prompt.name


def test_zero_shot_is_the_answer_of_the_pretrained_model(backbone, data, tmp_path, capsys):
    c = make_config(backbone, data, "zero_shot", **MASKED)
    config = tmp_path / "zero.json"
    config.write_text(c.to_json())
    code, out, err = jaxprompt(capsys, "evaluate", f"--config={config}", "--split=test")
    assert code == 0, err
    found = json.loads(out)
    assert found["split"] == "test" and found["examples"] == 24

    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, BertForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(backbone)
    model = BertForMaskedLM.from_pretrained(backbone).eval()
    words = tokenizer.convert_tokens_to_ids(list(TOPICS))
    right = []
    for row in read_lines(data / "test.jsonl"):
        ids = tokenizer(f"{row['text']} about [MASK] .", return_tensors="pt")
        with torch.no_grad():
            logits = model(**ids).logits[ids["input_ids"] == tokenizer.mask_token_id][0, words]
        right.append(list(TOPICS)[logits.argmax()] == row["label"])
    assert found["accuracy"] == pytest.approx(np.mean(right)) and found["accuracy"] > 1 / 3


# -- numbers out, numbers in ----------------------------------------------------------------------

SHORT = STILL | dict(train__total_steps=6, train__eval_steps=3)
ROUND_TRIPS = {
    "prefix": ("prefix", dict(prompt__dropout=0, prompt__layers="2-2")),
    "prefix_mlp": ("prefix", dict(prompt__dropout=0, prompt__hidden=8)),
    "soft": ("soft", LM | {"task.template": "{text} [soft] [mask] ."}),
    "bias_only": ("bias_only", {}),
}
# Numbers of the exported prompt, beside the head.
PROMPT = {"prefix": 2 * 4 * WIDTH, "prefix_mlp": LAYERS * 2 * 4 * WIDTH, "soft": 4 * WIDTH}
HEAD = (WIDTH + 1) * 3


@pytest.mark.default_cases("prefix")
@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_what_is_exported_predicts_as_what_was_trained(case, backbone, data, tmp_path, capsys):
    method, fields = ROUND_TRIPS[case]
    c = make_config(backbone, data, method, **SHORT, **fields)
    result = train_prompt(c, str(tmp_path)).to_json()
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    code, out, err = jaxprompt(capsys, "evaluate", *place, "--split=test")
    assert code == 0, err
    evaluated = json.loads(out)
    assert evaluated == {"split": "test", "examples": 24, **result["test"]}

    code, out, err = jaxprompt(capsys, "export", *place)
    assert code == 0, err
    sizes = {path.rsplit("/")[-1]: size for path, size in json.loads(out).items()}
    file = (tmp_path / "export" / "prompt.safetensors").read_bytes()
    assert sizes["prompt.safetensors"] == len(file)
    header = 8 + struct.unpack("<Q", file[:8])[0]
    if case in PROMPT:
        assert len(file) - header == 4 * (PROMPT[case] + HEAD * (case != "soft"))
    else:
        assert len(file) - header == 4 * result["trained"]
    assert header < 200 + 150 * (1 + result["trained"] // 32)

    card = json.loads((tmp_path / "export" / "prompt.json").read_text())
    assert card["method"] == c.prompt.name and card["hyper"] == c.prompt.to_dict()
    assert card["backbone"]["id"] == str(backbone) and card["backbone"]["family"] == "bert"
    assert len(card["backbone"]["fingerprint"]) == 64
    assert card["task"]["labels"] == list(TOPICS) and card["seed"] == 0
    assert card["template"] == (c.task.template or "{text}")
    words = [[word] for word in TOPICS] if case == "soft" else None
    assert card["label_words"] == words
    assert card["metrics"] == {"dev": result["dev"], "test": result["test"]}
    assert {"jax", "flax", "numpy", "python"} <= set(card["versions"])

    answers = tmp_path / "answers.jsonl"
    given = f"--input={data / 'test.jsonl'}"
    code, out, _ = jaxprompt(
        capsys, "predict", f"--workdir={tmp_path}", given, f"--output={answers}"
    )
    assert code == 0 and out == ""
    rows, given = read_lines(answers), read_lines(data / "test.jsonl")
    assert [row["text"] for row in rows] == [row["text"] for row in given]
    found = np.array([[row["scores"][name] for name in TOPICS] for row in rows])
    expected = probabilities(split_scores(c, tmp_path, "test"), 3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    right = [row["prediction"] == gold["label"] for row, gold in zip(rows, given, strict=True)]
    assert np.mean(right) == pytest.approx(evaluated["accuracy"])
    assert all(row["score"] == max(row["scores"].values()) for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["npy", "export"])
def test_a_soft_prompt_starts_from_a_file(kind, backbone, data, tmp_path, capsys):
    first = make_config(backbone, data, "soft", **SHORT)
    train_prompt(first, str(tmp_path / "first"))
    place = (f"--config={tmp_path / 'first/config.json'}", f"--workdir={tmp_path / 'first'}")
    rows = tmp_path / "rows.npy"
    assert jaxprompt(capsys, "export", *place, f"--npy={rows}")[0] == 0
    assert np.load(rows).shape == (4, WIDTH) and rows.stat().st_size == 128 + 4 * 4 * WIDTH
    file = rows if kind == "npy" else tmp_path / "first/export"
    # At a rate of 0 the rows stay where they start.
    fields = dict(prompt__start="file", prompt__file=file, optim__lr=0, optim__lr_head=1e-2)
    second = make_config(backbone, data, "soft", **SHORT, **fields)
    train_prompt(second, str(tmp_path / "second"))
    place = (f"--config={tmp_path / 'second/config.json'}", f"--workdir={tmp_path / 'second'}")
    again = tmp_path / "again.npy"
    assert jaxprompt(capsys, "export", *place, f"--npy={again}")[0] == 0
    assert again.read_bytes() == rows.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("family", ["roberta", "electra"])
def test_other_families_go_the_same_way(family, data, tmp_path, capsys):
    folder = make_backbone(tmp_path / family, family)
    c = make_config(folder, data, "prefix", **SHORT, **LM, task__template="{text} : [mask]")
    result = train_prompt(c, str(tmp_path / "run")).to_json()
    place = (f"--config={tmp_path / 'run/config.json'}", f"--workdir={tmp_path / 'run'}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    flags = (f"--workdir={tmp_path / 'run'}", f"--input={data / 'test.jsonl'}")
    rows = [json.loads(line) for line in jaxprompt(capsys, "predict", *flags)[1].splitlines()]
    given = read_lines(data / "test.jsonl")
    right = [row["prediction"] == gold["label"] for row, gold in zip(rows, given, strict=True)]
    assert np.mean(right) == pytest.approx(result["test"]["accuracy"])
