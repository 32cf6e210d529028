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
    "soft_task": ("soft", dict(prompt__start="task"), 3e-2),
    "head_only": ("head_only", {}, 3e-2),
    "full": ("full", {}, 3e-3),
    "soft_verbalizer": ("soft", LM | {"task.template": "{text} [soft] [mask] ."}, 1e-1),
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
    words = [f"--workdir={tmp_path}", f"--input={data / 'test.jsonl'}", f"--output={answers}"]
    code, out, _ = jaxprompt(capsys, "predict", *words)
    assert code == 0 and out == ""
    rows = read_lines(answers)
    gold = [(row["text"], row["label"]) for row in read_lines(data / "test.jsonl")]
    assert [(row["text"], row["label"]) for row in rows] == gold
    scores = np.array([[row["scores"][name] for name in TOPICS] for row in rows])
    expected = probabilities(split_scores(c, tmp_path, "test"), 3)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-6)
    right = np.mean([row["prediction"] == row["label"] for row in rows])
    assert right == pytest.approx(evaluated["accuracy"])
    assert all(row["score"] == max(row["scores"].values()) for row in rows)
