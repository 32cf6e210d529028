"""A router chooses prompts by texts, alike in every batch and on a mesh, or chooses none."""

import dataclasses
import json

import numpy as np
import pytest
from test_banks import attach as attach_random
from tiny_run import TOPICS, jaxprompt, make_backbone, write_rows

import jaxprompt as jp
from jaxprompt.serving.router import _empty_router, _make_encoder, text_states
from jaxprompt.tree import has_layer_lists


def name_rows(topic, seed, count):
    """Returns sentences of one topic, with a label that the router does not need."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(TOPICS[topic], 1 + i % 5)) for i in range(count)]
    return [{"text": text, "label": topic} for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def examples():
    return {topic: name_rows(topic, i, 40) for i, topic in enumerate(TOPICS)}


@pytest.fixture(scope="module")
def prompts(trained):
    """A prompt for each topic, made of one by noise."""
    first, rng = trained.prompt, np.random.default_rng(0)
    noisy = lambda x: (x + rng.normal(0, 0.5, x.shape)).astype(np.float32)
    return {
        topic: jp.Prompt({name: noisy(x) for name, x in first.tensors.items()}, first.card)
        for topic in TOPICS
    }


@pytest.fixture(scope="module")
def router(backbone, prompts, examples):
    return jp.train_router(backbone, prompts, examples, accuracy=0.9, max_len=24)


@pytest.fixture(scope="module")
def bank(backbone, prompts, router):
    return jp.attach(backbone, prompts, by="task", batch=16, router=router)


@pytest.fixture(scope="module")
def mixed():
    """Rows of all topics in turns, and their topics."""
    by_topic = [name_rows(topic, 10 + i, 12) for i, topic in enumerate(TOPICS)]
    return [row for rows in zip(*by_topic, strict=True) for row in rows], list(TOPICS) * 12


def routes(answers):
    return [(row.get("route"), row.get("confidence")) for row in answers]


def test_rows_get_the_prompts_of_their_texts(backbone, prompts, router, bank, mixed):
    rows, topics = mixed
    answers = jp.predict(bank, rows)
    right = [answer.get("route") == topic for answer, topic in zip(answers, topics, strict=True)]
    assert np.mean(right) > 0.8
    for topic, prompt in prompts.items():
        indices = [i for i, answer in enumerate(answers) if answer.get("route") == topic]
        alone = jp.predict(jp.attach(backbone, prompt), [rows[i] for i in indices])
        for index, row in zip(indices, alone, strict=True):
            answer = dict(answers[index])
            assert answer.pop("route") == topic
            assert router.card["router"]["threshold"] <= answer.pop("confidence") <= 1
            assert answer["prediction"] == row["prediction"]
            assert answer["score"] == pytest.approx(row["score"], abs=1e-5)
    # A row that names its prompt gets that one, as without a router; texts are rows.
    named = [{"task": "tool", **rows[0]}, {"task": "", **rows[0]}]
    first, second = jp.predict(bank, named)
    assert "route" not in first and second["route"] == answers[0]["route"]
    assert routes(jp.predict(bank, [row["text"] for row in rows])) == routes(answers)
    assert router.card["router"]["columns"] == ["text"]  # not the label
    held_out = router.card["metrics"]["held_out"]
    assert held_out["routed_accuracy"] >= 0.9
    counts = router.card["router"]["held_out"]
    sums = {topic: sum(parts.values()) for topic, parts in counts.items()}
    assert sums == dict.fromkeys(TOPICS, 40)
    routed = 1 - sum(parts.get("", 0) for parts in counts.values()) / 120
    assert held_out["routed"] == pytest.approx(routed)


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((2, 2), marks=pytest.mark.long)])
def test_neither_batches_nor_padding_nor_the_mesh_change_a_route(
    folder, backbone, prompts, router, bank, mixed, mesh
):
    rows, _ = mixed
    backbone = backbone if mesh == (1, 1) else jp.load_backbone(str(folder), mesh=mesh)
    other = jp.attach(backbone, prompts, by="task", batch=4, router=router)
    # A long row beside them pads the others.
    more = [*rows[:7], {"text": "cat " * 60}]
    answers = jp.predict(other, more)[:7]
    right = jp.predict(bank, rows[:7])
    assert [name for name, _ in routes(answers)] == [name for name, _ in routes(right)]
    values = [[value or 0.0 for _, value in routes(x)] for x in (answers, right)]
    np.testing.assert_allclose(*values, atol=1e-5)


def states_of(backbone, texts):
    router = _empty_router(backbone, ("a", "b"), 40)
    encoder = _make_encoder(backbone, router, 3, False)
    return text_states(encoder, backbone.loaded.params, backbone.placement, texts)


def test_states_are_those_of_the_middle_layer(folder, backbone, texts):
    """As transformers computes them, text by text, averaged without [CLS] and [SEP]."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    for text, states in zip(texts[:5], states_of(backbone, texts[:5]), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states
        assert len(hidden) == 3
        np.testing.assert_allclose(states, hidden[1][0, 1:-1].mean(0).numpy(), atol=1e-5)


@pytest.mark.long
def test_separate_layers_give_the_same_states(tmp_path, texts):
    """As they are loaded to generate texts."""
    folder = str(make_backbone(tmp_path / "llama", "llama"))
    backbones = [jp.load_backbone(folder, stack=stack) for stack in ("scan", "unroll")]
    assert [has_layer_lists(x.loaded.params) for x in backbones] == [False, True]
    states = [states_of(backbone, texts[:5]) for backbone in backbones]
    np.testing.assert_allclose(*states, atol=1e-5)


def with_router(router, **fields):
    card = router.card | {"router": router.card["router"] | fields}
    return dataclasses.replace(router, card=card)


def test_a_row_without_a_likely_prompt_has_an_error(backbone, prompts, router, mixed):
    rows, _ = mixed
    doubtful = with_router(router, threshold=1.5)
    bank = jp.attach(backbone, prompts, router=doubtful)
    answers = jp.predict(bank, [rows[0], {**rows[0], "prompt": "food"}])
    assert list(answers[0]) == ["error"] and "prediction" in answers[1]
    assert "rows:1: the router chose no prompt: the most likely, " in answers[0]["error"]
    with pytest.warns(UserWarning, match="1 of 2 rows are left out, the first: rows:1: the router"):
        measured = jp.evaluate(bank, [rows[0], {**rows[0], "prompt": "food"}])
    assert measured["food"]["examples"] == 1
    with pytest.raises(
        jp.InputError, match="rows:1: there is no text in text, which the router reads"
    ):
        jp.predict(bank, [{"words": "a cat"}])


def test_prompts_whose_columns_a_row_lacks_are_not_chosen(backbone, prompts, examples):
    pairs = [{"text": row["text"], "more": "a cat", "label": "tool"} for row in examples["tool"]]
    card = prompts["tool"].card
    task = card["task"] | {"fields": ["text", "more"]}
    pair = dataclasses.replace(prompts["tool"], card=card | {"task": task})
    both = {"food": prompts["food"], "pair": pair}
    rows = {"food": examples["food"], "pair": pairs}
    router = jp.train_router(backbone, both, rows, kind="linear", accuracy=0.5)
    bank = jp.attach(backbone, both, router=router)
    text = " ".join(row["text"] for row in examples["tool"][:4]) + " a cat"
    both_columns, text_alone, neither = jp.predict(
        bank, [{"text": text, "more": "a cat"}, {"text": text}, {"more": text}]
    )
    assert both_columns["route"] == "pair" and both_columns["confidence"] < 1
    assert (text_alone["route"], text_alone["confidence"]) == ("food", 1.0)  # the one that fits
    assert "there is no column 'text'" in neither["error"]
    assert neither["error"].endswith("; the router chose prompt pair")


def test_what_makes_no_router_is_named(backbone, prompts, examples, router):
    def refused(message, function, *args, **options):
        with pytest.raises(jp.InputError, match=message):
            function(*args, **options)

    swapped = {**prompts, "tool": prompts["food"]}
    refused(
        "other prompts: tool .saved '[0-9a-f]{12}', now", jp.attach, backbone, swapped,
        router=router,
    )  # fmt: skip
    jp.attach(backbone, swapped, router=router, force=True)
    two = {name: prompts[name] for name in ("food", "tool")}
    refused("other prompts: beast ", jp.attach, backbone, two, router=router, force=True)
    refused("export without a router", jp.attach, backbone, two, router=prompts["food"])
    refused("the router is a router, which chooses", jp.attach, backbone, router)
    refused("router is only valid for several", jp.attach, backbone, two["food"], router=router)
    other = {**router.card, "backbone": router.card["backbone"] | {"fingerprint": "0" * 64}}
    other = dataclasses.replace(router, card=other)
    refused("trained on the weights 0{12}", jp.attach, backbone, prompts, router=other)
    train = jp.train_router, backbone
    refused("kind", *train, prompts, examples, kind="line")
    refused(r"accuracy=1.5 must be in \(0, 1\]", *train, prompts, examples, accuracy=1.5)
    refused("max_len=0 must be at least 1", *train, prompts, examples, max_len=0)
    refused("give a dict of rows", *train, prompts, examples["food"])
    chained = {"food": prompts["food"], "tool": router}
    refused("prompt tool: the router is a router", *train, chained, examples)
    refused("at least 2 prompts, not 1", *train, {"food": prompts["food"]}, examples)
    refused("prompt tool has no examples", *train, two, {"food": examples["food"]})
    strange = {**prompts["tool"].card, "backbone": other.card["backbone"]}
    strange = {"food": prompts["food"], "tool": dataclasses.replace(prompts["tool"], card=strange)}
    refused("prompt tool: the prompt was trained on the weights 0{12}", *train, strange, examples)
    few = {"food": examples["food"][:4], "tool": examples["tool"]}
    refused("prompt food has 4 examples in .*at least 5", *train, two, few)
    gap = {"food": [*examples["food"][:8], {"sentence": "x"}], "tool": examples["tool"]}
    refused("prompt food: rows of food:9: there is no text in text", *train, two, gap)


def test_the_commands_route(backbone, folder, prompts, examples, mixed, tmp_path, capsys):
    """The router is written beside the first prompt, and found there."""
    rows, topics = mixed
    flags = [f"--backbone={folder}", "--batch=16"]
    for topic, prompt in prompts.items():
        jp.save_prompt(prompt, tmp_path / "prompts" / topic)
        flags.append(f"--prompt={tmp_path / 'prompts' / topic}")
    files = [
        f"--examples={topic}={write_rows(tmp_path / f'{topic}.jsonl', part)}"
        for topic, part in examples.items()
    ]
    train = ["router", *flags, "--max-len=24", "--accuracy=0.9"]
    code, out, err = jaxprompt(capsys, *train, *files)
    assert code == 0, err
    result = json.loads(out)
    assert result["router"] == str(tmp_path / "prompts" / "router")
    assert result["routed_accuracy"] >= 0.9 and "held-out examples by chosen prompt: food" in err
    path = write_rows(tmp_path / "in.jsonl", [*rows, {"text": " ".join(topics[:3])}])
    code, out, err = jaxprompt(capsys, "predict", *flags, "--route=auto", f"--input={path}")
    assert code == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    router = jp.load_prompt(result["router"])
    bank = jp.attach(backbone, prompts, router=router, batch=16)
    right = jp.predict(bank, rows)
    assert [x.get("route") for x in answers[:-1]] == [x.get("route") for x in right]
    undecided = sum("error" in row for row in answers)
    assert not undecided or f"{undecided} of {len(answers)} lines have no answer" in err
    table = tmp_path / "table.csv"  # as pandas writes it
    table.write_text(",text\n0,the cat dog\n")
    code, out, err = jaxprompt(capsys, "predict", *flags, "--route=auto", f"--input={table}")
    assert code == 0 and json.loads(out)["route"] == "beast", err
    where = [f"--route={result['router']}", "--text=the cat dog", "--column=task"]
    code, out, err = jaxprompt(capsys, "predict", *flags, *where)
    assert code == 0 and json.loads(out)["route"] == "beast", err
    code, out, err = jaxprompt(capsys, "evaluate", *flags, "--route=auto", f"--input={path}")
    assert code == 0 and set(json.loads(out)) <= set(TOPICS), err
    for words, message in (
        ([*train, *files[1:]], "beast is not in the folder of its run"),
        ([*train, *files[1:], "--examples=bird=x"], "--examples=bird=x must be NAME=FILE"),
        ([*train, *files, f"--output={tmp_path / 'prompts' / 'food'}"], "an export that is no"),
        (["predict", *flags, "--route=autp", "--text=a"], "there is no router in autp; train one"),
        (["router", "--prompt=hub:a/b", "--prompt=c"], "--prompt=hub:a/b is on the hub"),
        (["predict", "--route=auto", "--text=a"], "--prompt or --workdir is missing"),
        (["predict", "--workdir=a", "--route=auto"], "--route=auto selects one of several"),
        (
            ["predict", *flags, "--route=auto", "--format=glue", "--text=a"],
            "and --route=auto selects among",
        ),
        (["evaluate", "--workdir=a", "--route=auto"], "--workdir=a is only valid for runs"),
        (
            ["predict", *flags, where[1], f"--route={tmp_path / 'prompts' / 'food'}"],
            "without a router",
        ),
    ):
        code, out, err = jaxprompt(capsys, *words)
        assert code == 2 and message in err, (words, err)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_texts_are_generated_by_routed_prompts(family, tmp_path, examples):
    backbone = jp.load_backbone(str(make_backbone(tmp_path / family, family)))
    rng = np.random.default_rng(0)
    width = backbone.backbone.module.dims.embed
    draw = lambda: {"prompt/slots": rng.normal(0, 0.7, (3, width)).astype(np.float32)}
    models = {topic: attach_random(backbone, draw(), slots=3) for topic in ("beast", "food")}
    prompts = {topic: model.prompt for topic, model in models.items()}
    router = jp.train_router(backbone, prompts, examples, accuracy=0.8, max_len=32)
    bank = jp.attach(backbone, prompts, batch=4, router=router)
    texts = [row["text"] for topic in models for row in name_rows(topic, 5, 6)]
    answers = jp.predict(bank, texts, max_new_tokens=4)
    for topic, model in models.items():
        mine = [i for i, answer in enumerate(answers) if answer.get("route") == topic]
        alone = jp.predict(model, [texts[i] for i in mine], max_new_tokens=4)
        assert [answers[i]["generated"] for i in mine] == [row["generated"] for row in alone]
    assert sum(answer.get("route") is not None for answer in answers) > 6
