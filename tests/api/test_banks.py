"""Texts of several prompts in one batch are those of each prompt alone."""

import json
from collections import Counter

import numpy as np
import pytest
from tiny_run import jaxprompt, make_backbone, write_rows

import jaxprompt as jp
from jaxprompt.serving.adapters import ImportedPrompt
from jaxprompt.serving.bank import answer_requests, bank_writer

TASK = jp.task("text", target="answer", template="{text}", metric="exact_match")
TEXTS = ["the new cat", "rice", "a red saw is old near the fox", "big", "the dog", "an axe"]
SAMPLED = {"temperature": 1.5, "top_k": 40, "n": 2, "max_new_tokens": 6, "logprobs": True}
BEAMS = {"num_beams": 3, "max_new_tokens": 6}
GREEDY = {"max_new_tokens": 9, "logprobs": True}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("banks") / "llama"
    return jp.load_backbone(str(make_backbone(folder, "llama")))


def attach(backbone, tensors=None, task=TASK, head=None, **fields):
    """Attaches random soft tokens, a random prefix or no prompt, without training."""
    name = "constant" if tensors else "none"
    imported = ImportedPrompt(tensors or {}, {"name": name, **fields}, {})
    prompt = jp.Prompt(imported.tensors, {}, "random", imported)
    sizes = dict(batch=16, max_len=40, max_target=8)
    return jp.attach(backbone, prompt, task=task, head=head or jp.text(), **sizes)


def make_models(backbone):
    """Returns a model of each prompt, alone: soft tokens, prefixes of two lengths, none."""
    rng = np.random.default_rng(0)
    dims = attach(backbone).scorer.model.prompt.dims
    layers = dims.decoder_layers or dims.layers
    parts = ("decoder_", "cross_") if dims.decoder_layers else ("",)

    def draw(*shape):
        return rng.normal(0, 0.7, shape).astype(np.float32)

    def soft(length):
        return attach(backbone, {"prompt/slots": draw(length, dims.embed)}, slots=length)

    def prefix(length, first, **fields):
        if backbone.backbone.family == "glm":  # whose adapters have no prefix
            return soft(length)
        tensors = {}
        for part in parts:
            shape = layers - first, length, dims.heads, dims.head_dim
            tensors |= {f"prompt/{part}{name}": draw(*shape) for name in "kv"}
            fields |= {f"{part}length": length, f"{part}first": first, f"{part}last": layers}
        return attach(backbone, tensors, **fields)

    shift = "shift_decoder" if dims.decoder_layers else "shift"
    return {
        "soft": soft(3),
        "prefix": prefix(5, 0, **{shift: 5}),
        "upper": prefix(2, layers - 1, **{shift: 2}),
        "none": attach(backbone),
    }


@pytest.fixture(scope="module")
def models(backbone):
    return make_models(backbone)


def make_bank(backbone, models, **generate):
    """Attaches all prompts; `generate` are other generation fields, by prompt."""
    prompts = {}
    for name, model in models.items():
        card = dict(model.prompt.card)
        card["generate"] = card["generate"] | generate.get(name, {})
        prompts[name] = jp.Prompt(model.prompt.tensors, card)
    return jp.attach(backbone, prompts, by="task", batch=4)


@pytest.fixture(scope="module")
def bank(backbone, models):
    return make_bank(backbone, models)


def rows_of(models, texts=TEXTS):
    return [{"task": name, "text": text} for text in texts for name in models]


def check_alone(models, rows, answers, options):
    """Asserts that the answers are those of each prompt alone, log-probabilities within 1e-5."""
    texts = set()
    for name, model in models.items():
        indices = [i for i, row in enumerate(rows) if row["task"] == name]
        alone = jp.predict(model, [{"text": rows[i]["text"]} for i in indices], **options)
        assert [answers[i].pop("task") for i in indices] == [name] * len(indices)
        for actual, right in zip((answers[i] for i in indices), alone, strict=True):
            logprobs = [np.hstack(row.pop("logprobs", [0.0])) for row in (actual, right)]
            assert actual == right, name
            np.testing.assert_allclose(*logprobs, atol=1e-5)
        texts.add(json.dumps(alone))
    assert len(texts) == len(models)  # every prompt matters


@pytest.mark.parametrize(
    "options, names",
    [
        pytest.param(SAMPLED, ("soft", "prefix"), id="two"),
        pytest.param(GREEDY, None, id="greedy", marks=pytest.mark.long),
        pytest.param(BEAMS, None, id="beams", marks=pytest.mark.long),
        pytest.param(SAMPLED, None, id="sampled", marks=pytest.mark.long),
    ],
)
def test_texts_are_those_of_each_prompt_alone(models, bank, options, names):
    """Rows of the bank take the places of finished ones of other prompts."""
    models = {name: models[name] for name in names or models}
    rows = rows_of(models)
    check_alone(models, rows, jp.predict(bank, rows, **options), options)


@pytest.mark.long
def test_samples_do_not_depend_on_how_requests_are_divided(models, bank):
    rows = rows_of(models)
    writing = bank.writing(SAMPLED)
    requests, num_earlier, texts = bank.read(rows), Counter(), {}
    for part in (requests[:7], requests[7:]):
        for index, answers in answer_requests(writing, part, num_earlier).items():
            texts.setdefault(index, []).extend(row["generated"] for row in answers.columns)
            num_earlier[index] += len(answers.columns)
    whole = jp.generate(bank, rows, **SAMPLED)
    for index, name in enumerate(models):
        assert texts[index] == [row["generated"] for row in whole if row["task"] == name]


@pytest.mark.long
def test_prompts_of_other_configs_share_no_pass(backbone, models):
    config = {"soft": {"max_new_tokens": 2}, "prefix": {"max_new_tokens": 5, "stop": ["a"]}}
    bank = make_bank(backbone, models, **config, upper=config["soft"], none=config["soft"])
    rows = rows_of(models, TEXTS[:3])
    answers = jp.predict(bank, rows)
    for name, model in models.items():
        texts = [row["generated"] for row in answers if row["task"] == name]
        options = config.get(name, config["soft"])
        assert texts == jp.generate(model, TEXTS[:3], **options), name
    rows = [
        {**row, "answer": answer["generated"]} for row, answer in zip(rows, answers, strict=True)
    ]
    assert jp.evaluate(bank, rows)["prefix"] == {"exact_match": 1.0, "examples": 3}


@pytest.mark.long
def test_a_prompt_of_classes_generates_beside_one_of_texts(backbone, models):
    """`predict` answers with each prompt's head, `generate` with texts only."""
    task = jp.task(
        "text", label="label", labels=("a", "b"), words=("cat", "saw"), template="{text} : [mask]"
    )
    classes = attach(backbone, task=task, head=jp.verbalizer())
    both = {"classes": classes, "prefix": models["prefix"]}
    bank, rows = make_bank(backbone, both), rows_of(both, TEXTS[:2])
    answers = jp.predict(bank, rows, max_new_tokens=3)
    alone = jp.predict(classes, TEXTS[:2])
    assert [row["prediction"] for row in answers[::2]] == [row["prediction"] for row in alone]
    assert answers[1].keys() == {"task", "generated"}
    texts = jp.generate(bank, rows, max_new_tokens=3)
    for i, (name, model) in enumerate(both.items()):
        right = jp.generate(model, TEXTS[:2], max_new_tokens=3)
        assert texts[i::2] == [{"task": name, "generated": text} for text in right]
    with pytest.raises(jp.InputError, match="n=2 is an option of generated texts, which none"):
        jp.predict(make_bank(backbone, {"classes": classes}), rows[::2], n=2)


def test_what_is_refused(models, bank):
    rows = rows_of(models, TEXTS[:1])
    with pytest.raises(jp.InputError, match="nearest: temperature"):
        jp.generate(bank, rows, temprature=1.0)
    # The longest prefix leaves fewer positions than the others.
    with pytest.raises(jp.InputError, match=r"prompt prefix: .* 5 positions of the prompt"):
        jp.generate(bank, rows, max_new_tokens=57)
    with pytest.raises(jp.InputError, match="unknown prompt 'sofa'; nearest: soft"):
        jp.generate(bank, [{"task": "sofa", "text": "a"}])
    with pytest.raises(jp.InputError, match="attach with one prompt"):
        next(jp.stream(bank, TEXTS[0]))


@pytest.mark.long
def test_the_commands_generate_by_a_column(backbone, models, bank, tmp_path, capsys):
    names = ("soft", "prefix")
    flags = [f"--backbone={backbone.backbone.folder}", "--column=task", "--batch=4"]
    for name in names:
        jp.save_prompt(models[name].prompt, tmp_path / name)
        flags.append(f"--prompt={tmp_path / name}")
    rows = rows_of(names, TEXTS[:3])
    path = write_rows(tmp_path / "in.jsonl", rows)
    options = [f"--config.generate.{field}={value}" for field, value in SAMPLED.items()]
    code, out, err = jaxprompt(capsys, "predict", *flags, *options, f"--input={path}")
    assert code == 0, err
    right = jp.generate(bank, rows, **SAMPLED)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == [row["text"] for row in rows]
    for name in ("task", "generated", "tokens"):
        assert [line[name] for line in lines] == json.loads(
            json.dumps([row[name] for row in right])
        )
    code, out, err = jaxprompt(capsys, "predict", *flags, "--config.seed=1", f"--input={path}")
    assert code == 2 and "only fields of --config.generate" in err and err.count("\n") == 1
    long = write_rows(tmp_path / "long.jsonl", rows[:2])
    options = ["--config.generate.max_new_tokens=57", "--on-error=skip"]
    code, out, err = jaxprompt(capsys, "predict", *flags, *options, f"--input={long}")
    assert code == 0 and "1 of 2 lines have no answer" in err, err
    assert "5 positions of the prompt" in json.loads(out.splitlines()[1])["error"]


@pytest.mark.long
@pytest.mark.parametrize("family", ["t5", "gpt2", "mistral", "glm"])
def test_other_families(family, tmp_path):
    backbone = jp.load_backbone(str(make_backbone(tmp_path / family, family)))
    models = make_models(backbone)
    bank, rows = make_bank(backbone, models), rows_of(models)
    for options in (GREEDY, BEAMS, SAMPLED):
        check_alone(models, rows, jp.predict(bank, rows, **options), options)


@pytest.mark.long
def test_a_mesh_writes_the_same(backbone, models, bank):
    """There no row is replaced, and a writer of equal prompts is compiled once."""
    spread = jp.load_backbone(str(backbone.backbone.folder), mesh=(2, 2))
    rows = rows_of(models)
    other = make_bank(spread, models)
    for options in (GREEDY, SAMPLED):
        count = bank_writer.cache_info().misses
        answers = jp.predict(other, rows, **options)
        check_alone(models, rows, answers, options)
        assert jp.predict(other, rows, **options)[0]["generated"] == answers[0]["generated"]
        assert bank_writer.cache_info().misses == count + 1
