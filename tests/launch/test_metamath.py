"""launch/metamath.py prepares PEFT's benchmark and trains on it, at tiny size."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.metamath import ANSWER
from jaxprompt.__main__ import main
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import read_file
from jaxprompt.errors import InputError
from jaxprompt.scoring.answer_pattern import find_answer
from launch import metamath

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from tiny_run import make_backbone  # noqa: E402

SUMS = [(a, b) for a in range(2, 9) for b in range(2, 9)]
METAMATH = [
    {"type": "GSM_AnsAug", "query": f"What is {a} + {b}?", "original_question": "",
     "response": f"{a} + {b} = {a + b}.\n#### {a + b}\nThe answer is: {a + b}"}
    for a, b in SUMS
]  # fmt: skip
GSM8K = [
    {"question": f"Ann has {a} pens and {b} more.", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
    for a, b in SUMS * 2
]


@pytest.fixture
def hub(monkeypatch):
    """Stands in for both data sets of the hub; lists what was read."""
    long_row = METAMATH[0] | {"response": "1" * metamath.MAX_CHARACTERS}
    sets = {
        ("hub:meta-math/MetaMathQA", "train"): [METAMATH[0], long_row, *METAMATH[1:]],
        ("hub:openai/gsm8k:main", "train"): GSM8K,
        ("hub:openai/gsm8k:main", "test"): GSM8K[:6],
    }
    read = []

    def read_split(task, split, *, source):
        read.append(source)
        return Rows(sets[source, split], source)

    monkeypatch.setattr(metamath, "read_split", read_split)
    return read


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["metamath.py", *words])
    return metamath.main()


def test_its_files_have_the_rows_of_peft(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(metamath, "TRAINED", 40)
    metamath.write_data(tmp_path / "data")
    train, dev, test = (
        list(read_file(tmp_path / f"data/{x}.jsonl")) for x in ("train", "dev", "test")
    )
    assert train == METAMATH[:40]  # without the long row
    np.random.seed(0)  # as PEFT's data.py
    indices = np.arange(len(GSM8K))
    np.random.shuffle(indices)
    assert dev == list(metamath.renamed(GSM8K[i] for i in indices[:50]))
    assert test == [{"query": r["question"], "response": r["answer"]} for r in GSM8K[:6]]


def test_a_wrong_method_downloads_nothing(hub, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--method='prefix_txt' is unknown; nearest: prefix_text"):
        run(monkeypatch, f"--workdir={tmp_path / 'run'}", "--method=prefix_txt")
    assert not hub


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is $4^2$.The answer is: 16", "16"),
        ("The answer is: 16 apples", "16apples"),  # no number, as in PEFT
        ("The answer is 3/4. So", "3/4.So"),
        ("The final answer is: $7.50.", "15/2"),
        ("5 + 67 = 72\n#### 72", "72"),
        ("#### 2,125", "2125"),
        ("#### 1\nThe answer is: 2!\nQuestion: 3", "2"),
        ("The answer is: 50%", "50"),
        ("so it is 5", ""),
    ],
)
def test_answers_are_those_that_peft_finds(text, answer):
    assert find_answer(ANSWER, text) == answer


@pytest.mark.long
@pytest.mark.parametrize("method", ["prefix_text", "prompt_tuning_vocab", "p_tuning"])
def test_a_dry_run_at_tiny_size(method, hub, tmp_path, monkeypatch, capsys):
    """Trains, tests, exports and answers a question; the second time nothing is downloaded."""
    backbone = make_backbone(tmp_path / "llama", "llama", max_position_embeddings=320)
    fields = {
        "backbone.path": backbone, "prompt.length": 4, "data.max_len": 300, "data.max_target": 128,
        "train.total_steps": 4, "train.eval_steps": 4, "train.save_steps": 2,
        "generate.max_new_tokens": 8, "train.tracker": "none", "train.plot": False,
    }  # fmt: skip
    words = [f"--data={tmp_path / 'data'}", f"--workdir={tmp_path / 'run'}", f"--method={method}"]
    words += [f"--config.{name}={value}" for name, value in fields.items()]
    assert run(monkeypatch, *words) == 0 and len(hub) == 3
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["steps"] == 4 and 0 <= result["test"]["exact_match"] <= 1
    assert run(monkeypatch, *words) == 0 and len(hub) == 3
    assert main(["evaluate", f"--workdir={tmp_path / 'run'}", "--split=test"]) == 0
    assert main(["export", f"--workdir={tmp_path / 'run'}"]) == 0
    capsys.readouterr()
    assert main(["predict", f"--workdir={tmp_path / 'run'}", "--text=What is 2 + 2?"]) == 0
    assert "generated" in json.loads(capsys.readouterr().out)
