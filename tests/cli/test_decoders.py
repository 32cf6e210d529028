"""Backbones that write, through the command line: free texts, and what they cannot do."""

import json

import numpy as np
import pytest
import transformers
from tiny_run import (
    compare_answers,
    flags,
    make_backbone,
    make_config,
    predict,
    read_lines,
    sentences,
    succeed,
    tiny_fields,
    train_and_export,
    write_rows,
)

from jaxprompt.__main__ import main
from jaxprompt.runs.train import train_prompt

BACKBONES = ("t5", "gpt2", "glm", "llama")
WORDS = {"head.name": "verbalizer", "task.words": "beast,food,tool"}
T5 = WORDS | {"task.template": "{text} about [mask] ."}
GPT2 = WORDS | {"task.template": "{text} about [mask]"}
TEXT = {
    "head.name": "text", "task.target": "answer", "data.max_target": 6,
    "generate.max_new_tokens": 5,
}  # fmt: skip
ONE_STEP = {"train.total_steps": 1, "train.eval_steps": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {x: make_backbone(tmp_path_factory.mktemp(x) / x, x) for x in BACKBONES}


@pytest.fixture
def texts(tmp_path):
    """Rows whose topic is to be written."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for seed, (name, size) in enumerate({"train": 48, "dev": 12, "test": 12}.items()):
        rows = [{"text": r["text"], "answer": r["label"]} for r in sentences(seed, size)]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.mark.long
def test_a_backbone_writes_without_training(folders, texts, tmp_path, capsys):
    """Greedily, as transformers does."""
    fields = {"trainable": "", "data.max_len": 30, "task.template": "{text} about [mask]"}
    config = make_config(folders["llama"], texts, "head_only", **TEXT | fields)
    (tmp_path / "zero.json").write_text(config.to_json())
    out = tmp_path / "out.jsonl"
    words = [f"--config={tmp_path / 'zero.json'}", "--split=test", f"--output={out}"]
    metrics = json.loads(succeed(capsys, "evaluate", *words)[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["llama"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    rows = read_lines(out)
    for row in rows:
        ids = tokenizer(f"{row['text']} about", return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        assert row["generated"] == tokenizer.decode(new, skip_special_tokens=True).strip()
    share = np.mean([row["generated"] == row["answer"] for row in rows])
    assert metrics == {"split": "test", "examples": 12, "exact_match": pytest.approx(share)}


@pytest.mark.default_cases("t5-1")
@pytest.mark.parametrize("family, num_beams", [("t5", 1), ("gpt2", 2), ("glm", 2), ("llama", 1)])
def test_learns_to_write(family, num_beams, folders, texts, tmp_path, capsys):
    fields = TEXT | {
        "generate.num_beams": num_beams, "optim.lr": 1e-2, "data.max_len": 30,
        "data.multiple": 30, "train.total_steps": 60, "train.eval_steps": 60,
    }  # fmt: skip
    config = make_config(folders[family], texts, "full", **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, config)
    assert result["dev"]["exact_match"] >= 0.75, result
    rows = compare_answers(capsys, workdir, texts / "test.jsonl")
    share = np.mean([row["generated"] == row["answer"] for row in rows])
    assert share == pytest.approx(result["test"]["exact_match"])
    _, err = predict(capsys, workdir, f"--input={texts / 'test.jsonl'}")
    assert err.endswith(f"exact_match {share:.4f} on 12 of 12 examples, those with a label\n")


@pytest.mark.long
def test_a_prompt_of_classes_writes_on_request(folders, data, tmp_path, capsys, refused):
    config = make_config(folders["t5"], data, "soft", **ONE_STEP, **T5)
    _, workdir, _ = train_and_export(capsys, tmp_path, config)
    rows, _ = predict(capsys, workdir, "--text=the cat", "--text=a", "--generate")
    assert [row["text"] for row in rows] == ["the cat", "a"]
    assert all(isinstance(row["generated"], str) and "prediction" not in row for row in rows)
    words = ("--text=the cat", "--config.generate.max_new_tokens=1")
    ((row,), _) = predict(capsys, workdir, *words, "--generate")
    assert len(row["generated"].split()) <= 1
    command = ("predict", f"--workdir={workdir}")
    assert f"{workdir}/export predicts classes" in refused(*command, *words)
    wrong = ("--text=a", "--generate", "--config.generate.max_new_tokens=0")
    assert "generate.max_new_tokens=0 must be" in refused(*command, *wrong)
    other = ("--text=a", "--generate", "--config.optim.lr=1")
    assert "--config.optim.lr=1" in refused(*command, *other)


@pytest.mark.long
def test_a_text_that_leaves_no_room_is_the_only_one_that_is_not_answered(
    folders, texts, tmp_path, capsys, refused
):
    fields = TEXT | ONE_STEP | {"generate.max_new_tokens": 20, "data.max_len": 60}
    config = make_config(folders["gpt2"], texts, "full", **fields)
    _, workdir, _ = train_and_export(capsys, tmp_path, config)
    row = read_lines(texts / "test.jsonl")[0]
    rows = write_rows(tmp_path / "rows.jsonl", [row, {"text": "the cat " * 40}, row])
    line = refused("predict", f"--workdir={workdir}", f"--input={rows}", started=True)
    assert "rows.jsonl:2: " in line and "max_new_tokens=20 exceed" in line
    answers, _ = predict(capsys, workdir, f"--input={rows}", "--on-error=skip")
    assert ["generated" in answer for answer in answers] == [True, False, True]
    assert ["error" in answer for answer in answers] == [False, True, False]


@pytest.mark.long
def test_samples_do_not_depend_on_the_batch(folders, texts, tmp_path, capsys, refused):
    """Nor on the chunks in which `predict` reads its input; `evaluate` scores the same texts."""
    config = make_config(folders["llama"], texts, "soft", **TEXT | ONE_STEP | {"data.max_len": 30})
    _, workdir, _ = train_and_export(capsys, tmp_path, config)
    sampled = ("--config.generate.temperature=1.0", "--config.generate.n=3")
    inputs = f"--input={texts / 'test.jsonl'}"
    logs = "--config.generate.logprobs=True"
    few, _ = predict(capsys, workdir, inputs, *sampled, logs, "--batch=4")
    assert [len(row["generated"]) for row in few] == [3] * 12
    assert all(len(row["tokens"][0]) == len(row["logprobs"][0]) for row in few)
    alone, _ = predict(capsys, workdir, inputs, *sampled, "--batch=1")  # in chunks of 32 rows
    assert [row["generated"] for row in alone] == [row["generated"] for row in few]
    ours = [any(text == row["answer"] for text in row["generated"]) for row in few]
    for where in ((f"--workdir={workdir}", "--split=test"), (f"--prompt={workdir}/export", inputs)):
        assert main(["evaluate", *where, *sampled]) == 0
        scores = json.loads(capsys.readouterr().out)
        assert scores["pass@3"] == pytest.approx(np.mean(ours))
        assert scores["maj@3"] <= scores["pass@3"] and scores["examples"] == 12
    command = ("predict", f"--workdir={workdir}", "--text=a")
    assert "generate.n=3 needs samples" in refused(*command, "--config.generate.n=3")
    assert "generate.top_p=2.0 must be in (0, 1]" in refused(*command, "--config.generate.top_p=2")


def test_padding_takes_no_room_of_texts(folders, texts, tmp_path):
    """Of 66 positions 60 are read, 3 of them by what all rows share: 57, which are padded to 64."""
    rows = read_lines(texts / "dev.jsonl")
    write_rows(texts / "dev.jsonl", [row | {"text": 80 * "cat "} for row in rows])
    fields = TEXT | ONE_STEP | {
        "data.max_len": 60, "data.multiple": 8, "generate.max_new_tokens": 6, "prompt.length": 3,
        "train.test": False,
    }  # fmt: skip
    config = make_config(folders["gpt2"], texts, "soft", **fields)
    assert train_prompt(config, str(tmp_path / "run")).steps == 1


# -- bad input ------------------------------------------------------------------------------------

CHAT = {"task.chat": True}
REFUSED = {
    "no_sentinel": ("t5", T5 | {"backbone.sentinel": "<s_{}>"}, "has no sentinel '<s_0>'"),
    "writing_bert": ("bert", TEXT, "head.name=text needs a generative backbone"),
    "text_head": ("t5", {"head.name": "text"}, "head.name=text does not support a classification"),
    "text_task": ("t5", {"task.target": "answer"}, "head.name=linear does not support a free"),
    "chat_of_a_t5": ("t5", T5 | CHAT, "task.chat=True needs a generative model"),
    "chat_without": ("gpt2", CHAT, "has no chat template"),
    "chat_form": ("llama", WORDS | CHAT | {"task.form": "nss"}, "does not support task.form=nss"),
    "chat_of_demos": ("llama", GPT2 | CHAT | {"demos.exact": 2}, "but demos.exact=2 would add sev"),
    "rescale": ("gpt2", {"backbone.rescale": 100}, "backbone.rescale=100.0 is only valid with T5"),
    "mean": ("t5", {"head.pooler": "mean"}, "head.pooler=mean"),
    "positions": ("gpt2", {"data.max_len": 64}, "exceed the model's 66"),
    # Texts are written after an epoch only, and a workdir takes no other config.
    "room": (
        "gpt2",
        TEXT | {"generate.max_new_tokens": 60},
        "max_new_tokens=60 exceed the model's",
    ),
    "window": ("mistral", {"prompt.length": 8}, "does not fit the window of 8 tokens"),
}


def test_an_encoder_generates_nothing(run, refused):
    line = refused("predict", f"--workdir={run}", "--generate", "--text", "x", started=True)
    assert line.startswith("the backbone is an encoder, which cannot generate text")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, folders, backbone, texts, data, tmp_path, refused):
    family, fields, message = REFUSED[case]
    folder = backbone if family == "bert" else folders.get(family)
    if folder is None:
        folder = make_backbone(tmp_path / family, family)
    rows = texts if "task.target" in fields else data
    words = flags(tiny_fields(folder, rows) | fields)
    assert message in refused("validate", "--config=base", *words)
