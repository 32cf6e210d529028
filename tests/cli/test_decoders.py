"""Backbones that write, through the command line: label words, free texts, deep prompts."""

import json

import numpy as np
import pytest
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

from jaxprompt.runs.train import train_prompt
from jaxprompt.scoring.decisions import probabilities

STILL = dict(head__dropout=0)
LONG = STILL | dict(train__total_steps=60, train__eval_steps=60, train__log_steps=1)
SHORT = STILL | dict(train__total_steps=4, train__eval_steps=2)
WORDS = {"head.name": "verbalizer", "task.words": "beast,food,tool"}
T5 = WORDS | {"task.template": "{text} about [mask] ."}
GPT2 = WORDS | {"task.template": "{text} about [mask]"}
MEAN = dict(head__pooler="mean")
DEEP = dict(prompt__decoder=3, prompt__cross=2, prompt__dropout=0, prompt__scale=0.5)
CASES = {
    "t5_full_cloze": ("t5", "full", T5, 1e-2),
    "t5_full_target": ("t5", "full", T5 | {"head.span": "target"}, 1e-2),
    "t5_full_text": ("t5", "full", WORDS | {"task.form": "text"}, 1e-2),
    "t5_prefix_linear": ("t5", "prefix", DEEP, 3e-2),
    "t5_soft_linear": ("t5", "soft", dict(prompt__decoder=2), 3e-2),
    "glm_full_cloze": ("glm", "full", T5, 1e-2),
    "glm_prefix_linear": ("glm", "prefix", dict(prompt__dropout=0), 3e-2),
    "gpt2_full_words": ("gpt2", "full", GPT2, 1e-2),
    "gpt2_prefix_linear": ("gpt2", "prefix", MEAN | dict(prompt__dropout=0), 3e-2),
    "llama_prefix_words": ("llama", "prefix", GPT2 | dict(prompt__dropout=0), 3e-2),
    "llama_chat": ("llama", "full", GPT2 | {"task.chat": True}, 1e-2),
    "llama_soft_linear": ("llama", "soft", MEAN, 3e-2),
    "gpt2_soft_linear": ("gpt2", "soft", MEAN | dict(data__padding_side="left"), 3e-2),
}


BACKBONES = ("t5", "gpt2", "glm", "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {x: make_backbone(tmp_path_factory.mktemp(x) / x, x) for x in BACKBONES}


@pytest.mark.default_cases("llama_chat")
@pytest.mark.parametrize("case", CASES)
def test_learns_exports_and_predicts(case, folders, data, tmp_path, capsys):
    family, method, fields, rate = CASES[case]
    c = make_config(folders[family], data, method, **LONG, **fields, optim__lr=rate)
    result = train_prompt(c, str(tmp_path)).to_json()
    losses = [r["loss"] for r in read_lines(tmp_path / "metrics.jsonl") if "loss" in r]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3]), (losses[:3], losses[-5:])
    assert result["dev"]["accuracy"] >= 0.7  # 30 rows of three classes
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    given = read_lines(data / "test.jsonl")
    code, out, err = jaxprompt(
        capsys, "predict", f"--workdir={tmp_path}", f"--input={data / 'test.jsonl'}"
    )
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    found = np.array([[row["scores"][name] for name in TOPICS] for row in rows])
    expected = probabilities(split_scores(c, tmp_path, "test"), 3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)
    right = [row["prediction"] == gold["label"] for row, gold in zip(rows, given, strict=True)]
    assert np.mean(right) == pytest.approx(result["test"]["accuracy"])


def text_data(folder):
    folder.mkdir()
    for seed, (name, size) in enumerate({"train": 48, "dev": 12, "test": 12}.items()):
        rows = [{"text": r["text"], "answer": r["label"]} for r in sentences(seed, size)]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


TEXT = {
    "head.name": "text",
    "task.target": "answer",
    "data.max_target": 6,
    "generate.max_new_tokens": 5,
}


@pytest.mark.default_cases("t5-1")
@pytest.mark.parametrize(
    "family, num_beams", [("t5", 1), ("t5", 2), ("gpt2", 1), ("glm", 2), ("llama", 2)]
)
def test_learns_to_write(family, num_beams, folders, tmp_path, capsys):
    data = text_data(tmp_path / "data")
    fields = TEXT | {"generate.num_beams": num_beams}
    c = make_config(
        folders[family], data, "full", **LONG, **fields, optim__lr=1e-2, data__max_len=30,
        data__multiple=30,
    )  # fmt: skip
    result = train_prompt(c, str(tmp_path / "run")).to_json()
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
    told = f"exact_match {share:.4f} on 12 of 12 examples, those with a label\n"
    assert err.endswith(told)


@pytest.mark.long
def test_a_prompt_of_classes_writes_on_request(folders, data, tmp_path, capsys, refused):
    fields = T5 | {"generate.max_new_tokens": 3}
    c = make_config(folders["t5"], data, "soft", **SHORT, **fields, optim__lr=1e-2)
    train_prompt(c, str(tmp_path))
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    code, out, err = jaxprompt(
        capsys, "predict", f"--workdir={tmp_path}", "--generate", "--text", "the cat", "--text", "a"
    )
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["text"] for row in rows] == ["the cat", "a"]
    assert all(isinstance(row["generated"], str) and "prediction" not in row for row in rows)
    words = ("predict", f"--workdir={tmp_path}", "--text=the cat")
    code, out, _ = jaxprompt(capsys, *words, "--generate", "--max-new-tokens=1")
    assert code == 0 and len(json.loads(out)["generated"].split()) <= 1
    line = refused(*words, "--max-new-tokens=1")
    assert "--max-new-tokens=1" in line and f"{tmp_path}/export predicts classes" in line
    assert "--max-new-tokens=0 must be at least 1" in refused(
        *words, "--generate", "--max-new-tokens=0"
    )


def test_a_text_that_leaves_no_room_is_the_only_one_that_is_not_answered(
    folders, tmp_path, capsys, refused
):
    data = text_data(tmp_path / "data")
    fields = TEXT | {"generate.max_new_tokens": 20}
    c = make_config(folders["gpt2"], data, "full", **LONG, **fields, data__max_len=60)
    c = c.replace({"train.total_steps": 1, "train.eval_steps": 1})
    train_prompt(c, str(tmp_path / "run"))
    place = (f"--config={tmp_path / 'run/config.json'}", f"--workdir={tmp_path / 'run'}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    row = read_lines(data / "test.jsonl")[0]
    (column,) = row.keys() - {"answer"}
    rows = write_rows(tmp_path / "rows.jsonl", [row, {column: "the cat " * 40}, row])
    words = ("predict", f"--workdir={tmp_path / 'run'}", f"--input={rows}")
    line = refused(*words, started=True)
    assert (
        "rows.jsonl:2: " in line
        and "max_new_tokens=20 exceed" in line
        and "--on-error=skip" in line
    )
    code, out, err = jaxprompt(capsys, *words, "--on-error=skip")
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [("generated" in own, "error" in own) for own in found] == [
        (True, False), (False, True), (True, False),
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "family, kind", [("t5", "SEQ_2_SEQ_LM"), ("gpt2", "CAUSAL_LM"), ("llama", "CAUSAL_LM")]
)
def test_soft_tokens_go_to_peft(family, kind, folders, data, tmp_path, capsys):
    fields = T5 if family == "t5" else GPT2
    train_prompt(make_config(folders[family], data, "soft", **SHORT, **fields), str(tmp_path))
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    rows = tmp_path / "rows.npy"
    assert jaxprompt(capsys, "export", *place, f"--peft={tmp_path / 'a'}", f"--npy={rows}")[0] == 0
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    peft = pytest.importorskip("peft")

    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = peft.PeftModel.from_pretrained(auto.from_pretrained(folders[family]), tmp_path / "a")
    assert model.peft_config["default"].task_type == kind
    found = model.prompt_encoder["default"].embedding.weight.detach().numpy()
    np.testing.assert_array_equal(found, np.load(rows))


@pytest.mark.long
def test_deep_prompts_of_t5_do_not_go_to_peft(folders, data, tmp_path, refused):
    fields = dict(prompt__decoder=3, prompt__dropout=0)
    train_prompt(make_config(folders["t5"], data, "prefix", **SHORT, **fields), str(tmp_path))
    place = (f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path}")
    line = refused("export", *place, f"--peft={tmp_path / 'a'}", started=True)
    assert line.startswith("--peft: for a T5, PEFT only supports soft tokens of the encoder")
    assert not (tmp_path / "a").exists()


@pytest.mark.long
def test_a_bert_writes_nothing(run, refused):
    line = refused("predict", f"--workdir={run}", "--generate", "--text", "x", started=True)
    writers = "a T5, a GLM, a GPT-2 or a Llama"
    assert line == f"the backbone is an encoder, which cannot generate text; use {writers}"


REFUSED = {
    "no_sentinel": ("t5", T5 | {"backbone.sentinel": "<s_{}>"}, "has no sentinel '<s_0>'"),
    "no_start": ("no_start", T5, "lacks decoder_start_token_id"),
    "beams": ("t5", TEXT | {"generate.num_beams": 400}, "num_beams=400"),
    "target_too_long": ("t5", TEXT | {"data.max_target": 1}, "over data.max_target=1; raise"),
    "no_decoder": ("bert", {"prompt.decoder": 2}, "prompt.decoder=2 needs an encoder-decoder"),
    "no_cross": ("gpt2", {"prompt.cross": 2}, "prompt.cross=2 needs an encoder-decoder"),
    "positions": ("gpt2", {"data.max_len": 64}, "exceed the model's 66"),
    "writing_bert": ("bert", TEXT, "head.name=text needs a generative backbone"),
    "text_head": (
        "t5",
        {"head.name": "text"},
        "head.name=text does not support a classification task",
    ),
    "text_task": ("t5", {"task.target": "answer"}, "head.name=linear does not support a free"),
    "mask_inside": ("gpt2", T5, "at the end of its input; move [mask]"),
    "answer": ("t5", T5 | {"task.answer": "It is {label}"}, "task.answer='It is {label}'"),
    "metric": ("t5", TEXT | {"task.metric": "accuracy"}, "metric accuracy compares classes"),
    "chat_of_a_t5": ("t5", T5 | {"task.chat": True}, "task.chat=True needs a generative model"),
    "chat_without": ("gpt2", {"task.chat": True}, "has no chat template; use a model that was"),
    "chat_form": (
        "llama",
        WORDS | {"task.chat": True, "task.form": "nss"},
        "task.chat=True does not support task.form=nss; use",
    ),
    "chat_of_demos": (
        "llama",
        GPT2 | {"task.chat": True, "demos.exact": 2},
        "task.chat=True formats one turn, but demos.exact=2 would add several; set it to 0",
    ),
    "rescale": ("gpt2", {"backbone.rescale": 100}, "backbone.rescale=100.0 is only valid with T5"),
    "mean": ("t5", {"head.pooler": "mean"}, "head.pooler=mean"),
    "by_class": ("t5", TEXT | {"data.protocol": "kshot"}, "data.protocol=kshot samples by class"),
    "npy_shape": ("t5", "npy", "has shape [3, 32], but the prompt needs [4, 32]"),
    "npy_dtype": ("t5", "int", "has dtype int64; use float16"),
}


def test_room_for_texts_is_told_before_the_first_step(folders, tmp_path, refused):
    """The first text is written after an epoch, and a folder that has begun takes no other."""
    fields = TEXT | {"generate.max_new_tokens": 60}
    words = flags(tiny_fields(folders["gpt2"], text_data(tmp_path / "data")) | fields)
    for command in ("validate", "train"):
        given = ["--config=configs/base.py", f"--workdir={tmp_path / 'run'}", *words]
        assert "max_new_tokens=60 exceed the model's 66" in refused(command, *given)
    assert not (tmp_path / "run").exists()


def test_padding_takes_no_room_of_texts(folders, tmp_path):
    """Of 66 positions 60 are read, 3 of them by what all rows share: 57, which are laid to 64."""
    data = text_data(tmp_path / "data")
    rows = read_lines(data / "dev.jsonl")
    write_rows(data / "dev.jsonl", [row | {"text": 80 * "cat "} for row in rows])
    own = {"data.max_len": 60, "data.multiple": 8, "generate.max_new_tokens": 6, "prompt.length": 3}
    short = dict(train__total_steps=1, train__eval_steps=1, train__test=False)
    result = train_prompt(
        make_config(folders["gpt2"], data, "soft", **TEXT | own, **STILL | short),
        str(tmp_path / "run"),
    ).to_json()
    assert result["steps"] == 1


def test_a_window_that_a_prefix_fills_is_told_before_the_folder_is_made(data, tmp_path, refused):
    folder = make_backbone(tmp_path / "mistral", "mistral")
    window = json.loads((folder / "config.json").read_text())["sliding_window"]
    words = flags(tiny_fields(folder, data) | {"prompt.length": window})
    for command in ("validate", "train"):
        given = ["--config=configs/base.py", f"--workdir={tmp_path / 'run'}", *words]
        assert f"does not fit the window of {window} tokens" in refused(command, *given)
    assert not (tmp_path / "run").exists()


@pytest.mark.long_cases("beams")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, folders, backbone, data, tmp_path, refused):
    name, fields, message = REFUSED[case]
    folder = {"bert": backbone, **folders}.get(name)
    if folder is None:
        folder = make_backbone(tmp_path / "model", "t5")
        config = json.loads((folder / "config.json").read_text())
        del config["decoder_start_token_id"], config["pad_token_id"]
        (folder / "config.json").write_text(json.dumps(config))
    if fields in ("npy", "int"):
        rows = np.zeros((3, 32), np.float32) if fields == "npy" else np.zeros((4, 32), int)
        np.save(tmp_path / "rows.npy", rows)
        fields = {"prompt.start": "file", "prompt.file": tmp_path / "rows.npy"}
    if "task.target" in fields:
        data = text_data(tmp_path / "data")
    words = tiny_fields(folder, data) | fields
    if fields.get("prompt.start") == "file":
        words |= {"prompt.name": "soft"}
        config = tmp_path / "soft.py"
        config.write_text(
            "from configs.base import get_config as base\nfrom configs.parts import methods\n"
            "def get_config():\n    c = base()\n    methods.soft(c)\n    return c\n"
        )
    else:
        config = "configs/base.py"
    given = [f"--config={config}", f"--workdir={tmp_path / 'run'}", *flags(words)]
    assert message in refused("train", *given, started=True)
