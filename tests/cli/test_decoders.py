"""Backbones that write, through the command line: label words, free texts, deep prompts."""

import json

import numpy as np
import pytest
import transformers
from tiny_run import (
    TOPICS,
    flags,
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    sentences,
    split_scores,
    tiny_fields,
    write_rows,
)

from jaxprompt.runs.train import train_prompt as train
from jaxprompt.scoring.decisions import probabilities

STILL = dict(head__dropout=0)
LONG = STILL | dict(train__total_steps=60, train__eval_steps=60, train__log_steps=1)
SHORT = STILL | dict(train__total_steps=4, train__eval_steps=2)
WORDS = {"head.name": "verbalizer", "task.words": "beast,food,tool"}
T5 = WORDS | {"task.template": "{text} about [mask] ."}
GPT2 = WORDS | {"task.template": "{text} about [mask]"}
DEEP = dict(prompt__decoder=3, prompt__cross=2, prompt__dropout=0, prompt__scale=0.5)
CASES = {  # family, method, fields, learning rate
    "t5_full_cloze": ("t5", "full", T5, 1e-2),
    "t5_full_target": ("t5", "full", T5 | {"head.span": "target"}, 1e-2),
    "t5_full_text": ("t5", "full", WORDS | {"task.form": "text"}, 1e-2),
    "t5_prefix_linear": ("t5", "prefix", DEEP, 3e-2),
    "t5_soft_linear": ("t5", "soft", dict(prompt__decoder=2), 3e-2),
    "glm_full_cloze": ("glm", "full", T5, 1e-2),
    "llama_prefix_words": ("llama", "prefix", GPT2 | dict(prompt__dropout=0), 3e-2),
    "llama_chat": ("llama", "full", GPT2 | {"task.chat": True}, 1e-2),
    "gpt2_soft_linear": (
        "gpt2", "soft", dict(head__pooler="mean", data__padding_side="left"), 3e-2,
    ),
}  # fmt: skip
BACKBONES = ("t5", "gpt2", "glm", "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {x: make_backbone(tmp_path_factory.mktemp(x) / x, x) for x in BACKBONES}


@pytest.mark.default_cases("llama_chat")
@pytest.mark.parametrize("case", CASES)
def test_learns_exports_and_predicts(case, folders, data, tmp_path, capsys):
    family, method, fields, learning_rate = CASES[case]
    c = make_config(folders[family], data, method, **LONG, **fields, optim__lr=learning_rate)
    result = train(c, str(tmp_path)).to_json()
    losses = [r["loss"] for r in read_lines(tmp_path / "metrics.jsonl") if "loss" in r]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3]), (losses[:3], losses[-5:])
    assert result["dev"]["accuracy"] >= 0.7  # 30 rows of three classes
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    words = [f"--workdir={tmp_path}", f"--input={data / 'test.jsonl'}"]
    code, out, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    scores = np.array([[row["scores"][name] for name in TOPICS] for row in rows])
    expected = probabilities(split_scores(c, tmp_path, "test"), 3)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=5e-6)
    right = np.mean([row["prediction"] == row["label"] for row in rows])
    assert right == pytest.approx(result["test"]["accuracy"])


def text_data(folder):
    folder.mkdir()
    for seed, (name, size) in enumerate({"train": 48, "dev": 12, "test": 12}.items()):
        rows = [{"text": r["text"], "answer": r["label"]} for r in sentences(seed, size)]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


TEXT = {
    "head.name": "text", "task.target": "answer", "data.max_target": 6,
    "generate.max_new_tokens": 5,
}  # fmt: skip


@pytest.mark.default_cases("t5-1")
@pytest.mark.parametrize("family, num_beams", [("t5", 1), ("gpt2", 2), ("glm", 2), ("llama", 1)])
def test_learns_to_write(family, num_beams, folders, tmp_path, capsys):
    data = text_data(tmp_path / "data")
    fields = TEXT | {"generate.num_beams": num_beams}
    c = make_config(
        folders[family], data, "full", **LONG, **fields, optim__lr=1e-2, data__max_len=30,
        data__multiple=30,
    )  # fmt: skip
    result = train(c, str(tmp_path / "run")).to_json()
    assert result["dev"]["exact_match"] >= 0.75, result
    place = (f"--config={tmp_path / 'run/config.json'}", f"--workdir={tmp_path / 'run'}")
    written = tmp_path / "written.jsonl"
    code, out, err = jaxprompt(capsys, "evaluate", *place, "--split=test", f"--output={written}")
    assert code == 0, err
    assert json.loads(out) == {"split": "test", "examples": 12, **result["test"]}
    assert jaxprompt(capsys, "export", *place)[0] == 0
    given = f"--input={data / 'test.jsonl'}"
    code, out, err = jaxprompt(capsys, "predict", f"--workdir={tmp_path / 'run'}", given)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    share = np.mean([row["generated"] == row["answer"] for row in rows])
    assert share == pytest.approx(result["test"]["exact_match"])
    assert rows == read_lines(written)
    assert err.endswith(f"exact_match {share:.4f} on 12 of 12 examples, those with a label\n")


@pytest.mark.long
def test_a_prompt_of_classes_writes_on_request(folders, data, tmp_path, capsys, refused):
    fields = T5 | {"generate.max_new_tokens": 3}
    c = make_config(folders["t5"], data, "soft", **SHORT, **fields, optim__lr=1e-2)
    train(c, str(tmp_path))
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    words = ("predict", f"--workdir={tmp_path}", "--text=the cat")
    code, out, err = jaxprompt(capsys, *words, "--text=a", "--generate")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["text"] for row in rows] == ["the cat", "a"]
    assert all(isinstance(row["generated"], str) and "prediction" not in row for row in rows)
    code, out, _ = jaxprompt(capsys, *words, "--generate", "--max-new-tokens=1")
    assert code == 0 and len(json.loads(out)["generated"].split()) <= 1
    assert f"{tmp_path}/export predicts classes" in refused(*words, "--max-new-tokens=1")
    assert "--max-new-tokens=0" in refused(*words, "--generate", "--max-new-tokens=0")


def test_a_text_that_leaves_no_room_is_the_only_one_that_is_not_answered(
    folders, tmp_path, capsys, refused
):
    data = text_data(tmp_path / "data")
    fields = TEXT | {"generate.max_new_tokens": 20}
    c = make_config(folders["gpt2"], data, "full", **LONG, **fields, data__max_len=60)
    c = c.replace({"train.total_steps": 1, "train.eval_steps": 1})
    train(c, str(tmp_path / "run"))
    place = (f"--config={tmp_path / 'run/config.json'}", f"--workdir={tmp_path / 'run'}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    row = read_lines(data / "test.jsonl")[0]
    (column,) = row.keys() - {"answer"}
    rows = write_rows(tmp_path / "rows.jsonl", [row, {column: "the cat " * 40}, row])
    words = ("predict", f"--workdir={tmp_path / 'run'}", f"--input={rows}")
    line = refused(*words, started=True)
    assert "rows.jsonl:2: " in line and "max_new_tokens=20 exceed" in line
    code, out, err = jaxprompt(capsys, *words, "--on-error=skip")
    assert code == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert ["generated" in answer for answer in answers] == [True, False, True]
    assert ["error" in answer for answer in answers] == [False, True, False]


def test_padding_takes_no_room_of_texts(folders, tmp_path):
    """Of 66 positions 60 are read, 3 of them by what all rows share: 57, which are padded to 64."""
    data = text_data(tmp_path / "data")
    rows = read_lines(data / "dev.jsonl")
    write_rows(data / "dev.jsonl", [row | {"text": 80 * "cat "} for row in rows])
    fields = TEXT | {
        "data.max_len": 60, "data.multiple": 8, "generate.max_new_tokens": 6, "prompt.length": 3,
        "head.dropout": 0, "train.total_steps": 1, "train.eval_steps": 1, "train.test": False,
    }  # fmt: skip
    c = make_config(folders["gpt2"], data, "soft", **fields)
    assert train(c, str(tmp_path / "run")).steps == 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family, kind", [("t5", "SEQ_2_SEQ_LM"), ("gpt2", "CAUSAL_LM")])
def test_soft_tokens_go_to_peft(family, kind, folders, data, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    c = make_config(folders[family], data, "soft", **SHORT, **T5 if family == "t5" else GPT2)
    train(c, str(tmp_path))
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    rows = tmp_path / "rows.npy"
    assert jaxprompt(capsys, "export", *place, f"--peft={tmp_path / 'a'}", f"--npy={rows}")[0] == 0
    auto = getattr(transformers, f"AutoModelFor{'Seq2SeqLM' if family == 't5' else 'CausalLM'}")
    model = peft.PeftModel.from_pretrained(auto.from_pretrained(folders[family]), tmp_path / "a")
    assert model.peft_config["default"].task_type == kind
    weight = model.prompt_encoder["default"].embedding.weight.detach().numpy()
    np.testing.assert_array_equal(weight, np.load(rows))


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


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, folders, backbone, data, tmp_path, refused):
    family, fields, message = REFUSED[case]
    if family == "mistral":
        folder = make_backbone(tmp_path / "mistral", "mistral")
    else:
        folder = backbone if family == "bert" else folders[family]
    if "task.target" in fields:
        data = text_data(tmp_path / "data")
    words = ["--config=configs/base.py", *flags(tiny_fields(folder, data) | fields)]
    for command in (["validate"], ["train", f"--workdir={tmp_path / 'run'}"]):
        assert message in refused(*command, *words, started=True)
    assert not (tmp_path / "run").exists()


def test_an_encoder_generates_nothing(run, refused):
    line = refused("predict", f"--workdir={run}", "--generate", "--text", "x", started=True)
    assert line.startswith("the backbone is an encoder, which cannot generate text")
