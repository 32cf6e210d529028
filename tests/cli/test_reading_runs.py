"""Tasks of 2 to 4 choices through the command line; scores against transformers in torch."""

import functools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import ROOT, TOPICS, make_backbone, make_config, read_lines, succeed, write_rows

from jaxprompt.__main__ import main
from jaxprompt.build.examples import apply_form, read_task
from jaxprompt.config.load import load_config
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.runs.train import train_prompt

torch = pytest.importorskip("torch")

FIELDS = {
    "head.name": "verbalizer", "task.fields": "article,question", "task.label": "answer",
    "task.choices": "options", "data.max_len": 60, "data.multiple": 60, "data.eval_batch": 16,
    "train.total_steps": 3, "train.eval_steps": 3, "prompt.length": 4, "optim.lr": 0.3,
}  # fmt: skip
ASKED = "{article} ? {question|whole}"
CLOZE = {
    "task.words": "a,b,c,d", "task.template": f"{ASKED} {{choices}} : [mask]",
    "task.option": "{name} . {text} .",
}  # fmt: skip
UNIFIED = {"task.form": "unified", "task.template": f"{ASKED}?", "task.eos": False}
KINDS = {"bert": CLOZE, "t5": UNIFIED}


def questions(seed, size):
    """Rows whose answer is the option of the article's kind; some have 2 options, some 4."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(size):
        kind = list(TOPICS)[number % len(TOPICS)]
        others = [word for name in TOPICS if name != kind for word in TOPICS[name]]
        options = [*rng.choice(others, 1 + number % 3, replace=False), rng.choice(TOPICS[kind])]
        options = [str(word) for word in rng.permutation(options)]
        answer = next(word for word in options if word in TOPICS[kind])
        lines = [" ".join(rng.choice(TOPICS[kind], 4)) for _ in range(1 + number % 2)]
        article = "\n".join(lines)
        rows.append(
            {"article": article, "question": "it was", "options": options, "answer": answer}
        )
    return rows


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    for seed, (name, size) in enumerate({"train": 24, "dev": 12, "test": 18}.items()):
        write_rows(folder / f"{name}.jsonl", questions(seed, size))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def tuned(request, reading, tmp_path_factory):
    """A run of each kind, exported. -> kind, backbone, workdir, result"""
    kind = request.param
    backbone = make_backbone(tmp_path_factory.mktemp(kind) / kind, kind)
    workdir = tmp_path_factory.mktemp("run") / kind
    config = make_config(backbone, reading, "soft", **FIELDS, **KINDS[kind])
    result = train_prompt(config, str(workdir)).to_json()
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    assert main(["export", *place]) == 0
    return kind, backbone, workdir, result


load = functools.cache(load_tokenizer)


@functools.cache
def torch_model(kind, backbone):
    import transformers

    torch.set_num_threads(1)
    name = "BertForMaskedLM" if kind == "bert" else "T5ForConditionalGeneration"
    return getattr(transformers, name).from_pretrained(backbone).eval()


def recompute(kind, backbone, slots, row):
    """Log-probabilities of the options that a row has, by transformers. -> float64 [options]"""
    tokenizer, model = load(backbone), torch_model(kind, backbone)
    article, letters = row["article"], "abcd" if kind == "bert" else "ABCD"
    pairs = list(zip(letters, row["options"], strict=False))
    question = f" {article} ? {row['question']}"
    if kind == "bert":
        text = question + " " + "".join(f"{name} . {text} ." for name, text in pairs) + " :"
    else:
        text = question + "?" + "".join(f"{name}. {text}." for name, text in pairs)
        text += "? The correct one is"
    (ids,) = encode_texts(tokenizer, [text])
    words = [tokenizer.convert_tokens_to_ids(name) for name, _ in pairs]
    rows = torch.tensor(slots)[None]
    with torch.no_grad():
        if kind == "bert":
            ids = [tokenizer.cls_token_id, *ids, tokenizer.mask_token_id, tokenizer.sep_token_id]
            embeds = torch.cat([rows, model.get_input_embeddings()(torch.tensor([ids]))], 1)
            logits = model(inputs_embeds=embeds).logits[0, -2]
        else:
            sentinel = tokenizer.convert_tokens_to_ids("<extra_id_0>")
            ids = torch.tensor([[*ids, sentinel]])
            embeds = torch.cat([rows, model.get_input_embeddings()(ids)], 1)
            fed = torch.tensor([[0, sentinel]])
            logits = model(inputs_embeds=embeds, decoder_input_ids=fed).logits[0, -1]
    return logits[words].double().log_softmax(-1).numpy()


@pytest.mark.long_cases("t5")
def test_scores_are_those_of_torch(tuned, reading, capsys):
    """Of 2 to 4 options: no other is given, and probabilities are over those that there are."""
    kind, backbone, workdir, result = tuned
    rows = read_lines(reading / "test.jsonl")
    flag = f"--input={reading / 'test.jsonl'}"
    out, _ = succeed(capsys, "predict", f"--workdir={workdir}", flag)
    actual = [json.loads(line) for line in out.splitlines()]
    slots = load_file(workdir / "export/prompt.safetensors")["prompt/slots"]
    right = []
    for row, prediction in zip(rows, actual, strict=True):
        expected = recompute(kind, backbone, slots, row)
        assert list(prediction["scores"]) == ["A", "B", "C", "D"][: len(row["options"])]
        np.testing.assert_allclose(list(prediction["scores"].values()), np.exp(expected), atol=1e-5)
        right.append(row["options"][expected.argmax()] == row["answer"])
        assert prediction["prediction"] == "ABCD"[expected.argmax()]
    assert {len(row["options"]) for row in rows} == {2, 3, 4}
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}", "--split=test")
    out, _ = succeed(capsys, "evaluate", *place)
    assert json.loads(out)["accuracy"] == result["test"]["accuracy"] == np.mean(right)
    card = json.loads((workdir / "export/prompt.json").read_text())
    task, form = card["task"], card["layout"]["form"]
    assert card["label_words"] == [[x if kind == "bert" else x.upper()] for x in "abcd"]
    if kind == "bert":
        assert (form, task["option"]) == ("cloze", "{name} . {text} .")
    else:
        assert (form, task["option"], task["spaced"]) == ("unified", "{name}. {text}.", False)
        template = " {article} ? {question|whole}?{choices}? The correct one is [mask]"
        assert card["template"] == template


def test_what_a_config_says_of_options_and_words():
    """It goes before the task, and before the pattern; where it is empty they say."""
    said = {"task.option": "({name}) {text}"}
    cases = {
        ("c3", "cloze", ""): ("{name}、{text}。", False),
        ("c3", "cloze", "true"): (said["task.option"], True),
        ("sst2", "cloze", ""): ("", True),
        ("sst2", "cloze", "false"): (said["task.option"], False),
        ("custom", "cloze", ""): ("", True),
        ("custom", "cloze", "false"): (said["task.option"], False),
        ("c3", "unified", ""): ("{name}. {text}.", False),
        ("race", "unified", "true"): (said["task.option"], True),
    }
    for (name, form, spaced), expected in cases.items():
        field = "" if name in ("c3", "sst2") and form == "cloze" else "a"
        overrides = {
            "task.name": name,
            "task.form": form,
            "task.fields": field,
            "task.spaced": spaced,
        }
        overrides |= said if spaced else {}
        fields = overrides | {"head.name": "verbalizer"}
        config = load_config(str(ROOT / "configs/base.py"), list(fields.items()))
        task = apply_form(config, read_task(config.task))
        assert (task.option, task.spaced) == expected, (name, form, spaced)


@pytest.mark.parametrize(("changes", "message"), [
    ({"head.name": "linear"}, "task.form=unified answers with label words, which head.name=linear"),
    ({"task.target": "answer", "head.name": "text"}, "task.form=unified answers with label words"),
    ({"task.choices": "o", "task.words": "x,y"}, "task.words names the choices, but task.form"),
    ({"task.form": "unifed"}, "task.form='unifed' is unknown; nearest: unified"),
    ({"task.spaced": "no"}, "task.spaced='no' is unknown; known: false, true"),
])  # fmt: skip
def test_forms_that_are_refused(train, no_reading, changes, message):
    no_reading()
    fields = {"head.name": "verbalizer", "task.form": "unified"} | changes
    line = train(**{name.replace(".", "__"): value for name, value in fields.items()})
    assert line.startswith(message)
