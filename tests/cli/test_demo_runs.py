"""Demonstrations from a config to predictions: trained with, in context, and from an export."""

import json
import shutil

import numpy as np
import pytest
from spoil import BASE, write_card
from tiny_run import (
    TOPICS,
    flags,
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    tiny_fields,
    write_rows,
)
from transformers import AutoTokenizer, BertForMaskedLM, BertModel, LlamaForCausalLM

from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.build.sentence_encoder import SentenceEncoder, cosine
from jaxprompt.data.tasks.task import Example
from jaxprompt.runs.restore import restore_run

torch = pytest.importorskip("torch")

NAMES = list(TOPICS)
ABOUT = {
    "head.name": "verbalizer", "task.template": "{text} about [mask] .",
    "task.labels": ",".join(NAMES), "data.max_len": 64, "data.multiple": 16,
    "data.protocol": "kshot", "data.protocol.k": 4, "data.protocol.dev_k": 3,
    "backbone.dropout": 0.0,
}  # fmt: skip


def prepare(backbone, data, method, **fields):
    given = {name.replace(".", "__"): value for name, value in ABOUT.items()}
    return make_config(backbone, data, method, **given | fields)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama for longer texts."""
    folder = make_backbone(tmp_path_factory.mktemp("llama") / "llama", "llama")
    config = json.loads((folder / "config.json").read_text()) | dict(max_position_embeddings=160)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(c, folder):
    """Saves a config. -> its flag"""
    path = folder / "config.json"
    path.write_text(c.to_json())
    return f"--config={path}"


def evaluate(capsys, *flags):
    code, out, err = jaxprompt(capsys, "evaluate", "--split=test", *flags)
    assert code == 0, err
    return json.loads(out)


def torch_scores(backbone, texts):
    """Scores the topics at the mask of each text. -> logits [texts, 3]"""
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    model = BertForMaskedLM.from_pretrained(backbone).eval()
    words = tokenizer.convert_tokens_to_ids(NAMES)
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            logits = model(**ids).logits[ids["input_ids"] == tokenizer.mask_token_id]
        found.append(logits[0, words].numpy())
    return np.array(found)


@pytest.mark.long
@pytest.mark.parametrize("fields", [
    {"demos__per_class": 1, "demos__samples": 3}, {"demos__total": 4, "demos__samples": 2},
])  # fmt: skip
def test_in_context_is_the_mean_of_what_torch_gives(fields, backbone, data, tmp_path, capsys):
    """The texts are written out here; which are shown is taken from the run."""
    c = prepare(backbone, data, "zero_shot", **fields)
    flag, out = write(c, tmp_path), tmp_path / "out.jsonl"
    found = evaluate(capsys, flag, f"--output={out}")
    trained = restore_run(c, None, ["test"])
    gold = read_lines(data / "test.jsonl")
    samples = trained.scorer.demos.sample([Example({"text": row["text"]}) for row in gold])
    expected = []
    for row, own in zip(gold, samples, strict=True):
        texts = []
        for demos in own:
            parts = [f"{d.fields['text']} about {NAMES[d.label]} ." for d in demos]
            query = f"{row['text']} about [MASK] ."
            texts.append(
                " [SEP] ".join([*parts, query] if "demos__total" in fields else [query, *parts])
            )
        expected.append(torch_scores(backbone, texts).mean(0))
    expected = torch.tensor(np.array(expected)).softmax(-1).numpy()
    lines = read_lines(out)
    scores = np.array([[line["scores"][name] for name in NAMES] for line in lines])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    right = [
        NAMES[best] == row["label"] for best, row in zip(expected.argmax(-1), gold, strict=True)
    ]
    assert found["accuracy"] == pytest.approx(np.mean(right)) and found["examples"] == len(gold)
    assert all(
        len({d.label for d in demos}) == 3 for own in samples for demos in own if len(demos) == 3
    )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT that compares sentences, of other weights than the backbone's."""
    return make_backbone(tmp_path_factory.mktemp("sentences") / "bert", seed=5)


SENTENCES = [
    "the cat was near a dog",
    "bread",
    "an old saw with the very small hammer",
    "cake, rice",
]


def torch_embeddings(folder, texts):
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    model = BertModel.from_pretrained(folder).eval()
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        found.append(states[0].mean(0).numpy())
    return np.array(found, np.float64)


def test_sentences_are_compared_as_in_torch(encoder):
    found = SentenceEncoder(str(encoder)).embed(SENTENCES)
    expected = torch_embeddings(encoder, SENTENCES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    unit = expected / np.sqrt((expected**2).sum(-1, keepdims=True))
    np.testing.assert_allclose(cosine(found, found[:2]), unit @ unit[:2].T, atol=1e-5)


def test_a_deberta_compares_texts_cut_to_what_it_was_trained_on(tmp_path):
    """It reads texts of any length, and of that length no layout can be listed."""
    folder = make_backbone(tmp_path / "deberta", "deberta_v2")
    trained = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    encoder = SentenceEncoder(str(folder))
    rows = encoder.embed(["the cat " * trained, "the cat " * 2 * trained, "the rice"])
    assert encoder._max_len == trained
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-5)
    assert np.abs(rows[0] - rows[2]).max() > 1e-3


def test_the_most_similar_half_is_shown(backbone, data, encoder, tmp_path):
    c = prepare(
        backbone, data, "zero_shot", demos__per_class=1, demos__samples=60, demos__similar=0.5,
        demos__encoder=str(encoder),
    )  # fmt: skip
    demos = restore_run(c, None, ["test"]).scorer.demos
    queries = [row["text"] for row in read_lines(data / "test.jsonl")][:5]
    pool = torch_embeddings(encoder, [own.fields["text"] for own in demos.pool])
    labels = np.array([own.label for own in demos.pool])
    found = demos.sample([Example({"text": text}) for text in queries])
    for own, query in zip(found, torch_embeddings(encoder, queries), strict=True):
        near = pool @ query / np.sqrt((pool**2).sum(1) * (query @ query))
        for label in range(3):
            rows = np.flatnonzero(labels == label)
            best = rows[np.argsort(-near[rows])[:2]]  # of 4 of the class
            shown = {demos[label].fields["text"] for demos in own}
            assert shown == {demos.pool[row].fields["text"] for row in best}


@pytest.mark.long
@pytest.mark.parametrize("method", ["full", "dart"])
def test_what_is_trained_with_them_predicts_from_its_export(
    method, backbone, data, encoder, tmp_path, capsys
):
    fields = dict(
        demos__per_class=1, demos__samples=2, optim__lr=1e-3, demos__similar=0.5,
        demos__encoder=str(encoder), train__total_steps=12, train__eval_steps=6,
    )  # fmt: skip
    if method == "dart":
        fields |= dict(
            head__name="label_rows", task__template="{text} [soft*1] [mask] .",
            prompt__text="about", prompt__length=1, prompt__fluency=0.5,
        )  # fmt: skip
    c = prepare(backbone, data, method, **fields)
    flag, workdir = write(c, tmp_path), tmp_path / "run"
    code, out, err = jaxprompt(capsys, "train", flag, f"--workdir={workdir}")
    assert code == 0, err
    assert "demonstrations: 1 of each class, from 12 examples, among the most similar 0.5" in err
    assert "train 12, dev 9, test 24" in err
    result, rows = json.loads(out), tmp_path / "rows.jsonl"
    found = evaluate(capsys, f"--workdir={workdir}", f"--output={rows}")
    assert found == {"split": "test", "examples": 24, **result["test"]}
    assert jaxprompt(capsys, "export", f"--workdir={workdir}")[0] == 0
    expected = read_lines(rows)
    answers = tmp_path / "answers.jsonl"
    # In another order and in other batches: what is shown depends on the text alone.
    turned = write_rows(tmp_path / "turned.jsonl", read_lines(data / "test.jsonl")[::-1])
    words = [f"--workdir={workdir}", f"--input={turned}", f"--output={answers}", "--batch=5"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    assert f"accuracy {found['accuracy']:.4f} on 24 of 24" in err
    scores = [[[line["scores"][n] for n in NAMES] for line in own]
              for own in (read_lines(answers)[::-1], expected)]  # fmt: skip
    np.testing.assert_allclose(*scores, rtol=0, atol=2e-6)
    demos = read_export(str(workdir / "export"))[1].demos
    assert len(demos.examples) == 12 and demos.samples == 2
    shown = {demo.fields["text"] for demo in demos.examples}
    assert shown < {row["text"] for row in read_lines(data / "train.jsonl")}


@pytest.mark.long_cases("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoder_reads_them_in_front(family, data, tmp_path, capsys):
    folder = make_backbone(tmp_path / family, family)
    fields = dict(task__template="{text} about [mask]", demos__per_class=1, demos__samples=2)
    c = prepare(folder, data, "zero_shot", **fields)
    out = tmp_path / "out.jsonl"
    evaluate(capsys, write(c, tmp_path), f"--output={out}")
    from transformers import AutoModelForCausalLM

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    words = [tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in NAMES]
    assert all(len(word) == 1 for word in words)
    words = sum(words, [])
    demos = restore_run(c, None, ["test"]).scorer.demos
    for line in read_lines(out)[:6]:
        logits = []
        (samples,) = demos.sample([Example({"text": line["text"]})])
        for own in samples:
            parts = [f"{d.fields['text']} about {NAMES[d.label]}\n" for d in own]
            start = tokenizer("".join([*parts, f"{line['text']} about"]))["input_ids"]
            with torch.no_grad():
                last = model.eval()(torch.tensor([start])).logits[0, -1]
            logits.append(last[words].numpy())
        expected = torch.tensor(np.array(logits)).mean(0).softmax(-1).numpy()
        found = [line["scores"][name] for name in NAMES]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_llama_reads_exactly_so_many(count, llama, data, tmp_path, capsys):
    """Each line of its input is written out here; without any it is the text alone."""
    fields = dict(task__template="{text} about [mask]", data__max_len=128)
    c = prepare(llama, data, "zero_shot", **fields, demos__exact=count)
    scorer = restore_run(c, None, ["test"]).scorer
    out = tmp_path / "out.jsonl"
    evaluate(capsys, write(c, tmp_path), f"--output={out}")
    tokenizer, words = scorer.tokenizer, [f" {name}" for name in NAMES]
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words]
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    known = {row["text"]: row["label"] for row in read_lines(data / "train.jsonl")}
    orders = set()
    for line in read_lines(out)[:5]:
        example = Example({"text": line["text"]})
        (row,) = scorer.encode([example]).rows
        *shown, own = tokenizer.decode(row[0].ids).removeprefix("<s>").split("\n")
        assert own == f"{line['text']} about" and len(set(shown)) == count
        for demo in shown:
            text, label = demo.split(" about ")
            assert known[text] == label
        orders.add(tuple(shown))
        start = tokenizer("\n".join([*shown, own]))["input_ids"]
        assert row[0].ids.tolist() == start
        with torch.no_grad():
            last = model(torch.tensor([start])).logits[0, -1]
        found = [line["scores"][name] for name in NAMES]
        np.testing.assert_allclose(found, last[words].softmax(-1), rtol=0, atol=1e-5)
    assert (len(orders) == 1) == (count == 0)
    again = restore_run(c.replace({"data.seed": c.data.seed + 1}), None, ["test"]).scorer
    same = [s.encode([example]).rows[0][0].ids.tolist() for s in (scorer, again)]
    assert (same[0] == same[1]) == (count == 0)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields, parts", [
    ({"head.name": "linear"}, ["demos.per_class=1 shows label words", "head.name=verbalizer"]),
    ({"demos.total": 4}, ["demos.per_class=1 and demos.total=4; set one"]),
    ({"demos.similar": 0.5}, ["demos.encoder is empty", "set demos.similar=1"]),
    ({"demos.similar": 0.5, "demos.encoder": "nowhere/at/all"},
     ["demos.encoder='nowhere/at/all': ", "nowhere/at/all"]),
    ({"demos.per_class": 0, "demos.exact": 13},
     ["demos.exact=13, but there are 12 training examples; set demos.exact to 12 or less"]),
    ({"demos.exact": 4}, ["demos.per_class=1 and demos.exact=4; set one"]),
    ({"demos.per_class": 0, "demos.exact": 6, "data.max_len": 40},
     ["with 6 demonstrations takes ", " tokens in full, over the 40", "raise data.max_len by "]),
    ({"demos.per_class": 5}, ["demos.per_class=5, but class 'beast' has 4 training examples"]),
    ({"data.max_len": 16}, ["with 3 demonstrations takes 21 tokens", "over the 16 that data.max"]),
    ({"head.name": "discriminator", "task.template": "{text} [classes]"},
     ["demos.per_class=1 writes one label word at [mask]", "head.name=discriminator lists all"]),
    ({"task.entities": "<a>|</a>,<b>|</b>", "task.template": "{text|marked} [mask]"},
     ["demos.per_class=1 shows texts without entity markers", "without |marked"]),
    ({"task.form": "nss", "task.template": ""}, ["demos.per_class=1 shows examples of each class"]),
])  # fmt: skip
def test_what_does_not_fit_is_named(fields, parts, backbone, data, tmp_path, refused):
    fields = {name.replace(".", "__"): value for name, value in fields.items()}
    c = prepare(backbone, data, "full", **{"demos__per_class": 1, **fields})
    line = refused("train", write(c, tmp_path), f"--workdir={tmp_path / 'w'}", started=True)
    assert all(part in line for part in parts), line


def test_a_share_of_no_examples_is_refused(backbone, data, tmp_path, refused):
    words = [*flags(tiny_fields(backbone, data)), "--config.demos.similar=0"]
    line = refused("train", f"--config={BASE}", f"--workdir={tmp_path / 'w'}", *words)
    assert line == "demos.similar=0.0 must be in (0, 1]"


def test_trained_rows_around_entities_are_refused(backbone, data, tmp_path, refused):
    own = dict(task__entities="<a>|</a>,<b>|</b>", task__template="{text|soft} [mask]")
    c = prepare(backbone, data, "soft", demos__total=2, prompt__length=4, **own)
    line = refused("train", write(c, tmp_path), f"--workdir={tmp_path / 'w'}", started=True)
    assert "marks entities" in line and "without |soft, or set demos.total=0" in line


def test_a_decoder_compares_no_sentences(backbone, data, tmp_path, refused):
    folder = make_backbone(tmp_path / "gpt2", "gpt2")
    own = dict(demos__per_class=1, demos__similar=0.5, demos__encoder=str(folder))
    c = prepare(backbone, data, "zero_shot", **own)
    assert "is a gpt2; use a BERT" in refused("evaluate", write(c, tmp_path), started=True)


@pytest.fixture(scope="module")
def exported(backbone, data, encoder, tmp_path_factory):
    """The export of a prefix that was trained with demonstrations. -> workdir, its data"""
    from jaxprompt.__main__ import main

    root = tmp_path_factory.mktemp("shown")
    own = shutil.copytree(data, root / "data")
    c = prepare(
        backbone, own, "prefix", demos__per_class=1, demos__similar=0.5,
        demos__encoder=str(encoder), train__total_steps=2, train__eval_steps=2, data__max_len=60,
    )  # fmt: skip
    assert main(["train", write(c, root), f"--workdir={root / 'run'}"]) == 0
    assert main(["export", f"--workdir={root / 'run'}"]) == 0
    return root / "run", own


@pytest.mark.long
def test_other_formats_are_refused(exported, refused, tmp_path):
    workdir, _ = exported
    line = refused("export", f"--workdir={workdir}", f"--peft={tmp_path / 'p'}", started=True)
    assert "uses demonstrations, which PEFT does not support" in line
    line = refused("export", f"--workdir={workdir}", f"--stablehlo={tmp_path / 's'}", started=True)
    assert "stablehlo: the prompt uses demonstrations" in line


@pytest.mark.long
def test_inspect_averages_over_samples(backbone, data, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    c = prepare(
        backbone, data, "soft", demos__per_class=1, demos__samples=3, train__total_steps=2,
        train__eval_steps=2,
    )  # fmt: skip
    own = f"--workdir={tmp_path / 'run'}"
    assert jaxprompt(capsys, "train", write(c, tmp_path), own)[0] == 0
    code, _, err = jaxprompt(capsys, "inspect", own, "--split=test")
    assert code == 0, err
    found = json.loads((tmp_path / "run/inspect/inspect.json").read_text())
    counts = np.array(found["confusion"]["counts"])
    expected = evaluate(capsys, own)
    assert counts.sum() == expected["examples"]  # not once a sample
    assert counts.trace() / counts.sum() == pytest.approx(expected["accuracy"])
    assert any("first demonstrations" in line for line in found["remarks"])


def test_relations_are_shown_by_the_names_of_their_entities(backbone, tmp_path, capsys):
    rows = [
        {"text": f"the <e1>{name}</e1> was {word} <e2>it</e2>", "label": label}
        for word in ("near", "very", "a", "this")
        for name, label in (("cat", "yes"), ("bread", "no"))
    ]
    for split in ("train", "dev", "test"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    c = prepare(
        backbone, tmp_path, "zero_shot", demos__per_class=1, demos__samples=2,
        task__fields="text", task__entities="<e1>|</e1>,<e2>|</e2>", task__labels="yes,no",
        task__words="beast,food", task__negative="no", task__metric="micro_f1",
        task__template="{text} {entity1} is the [mask] of {entity2}", data__protocol__k=2,
        data__protocol__dev_k=2,
    )  # fmt: skip
    found = evaluate(capsys, write(c, tmp_path))
    assert found["examples"] == 8 and {"micro_f1", "precision", "recall"} <= found.keys()


@pytest.mark.long
def test_other_training_examples_or_fields_are_refused(exported, refused, tmp_path):
    workdir, own = exported
    words = ["evaluate", f"--workdir={workdir}", "--split=test"]
    # Of the same examples others would be shown.
    for command in (words, ["export", f"--workdir={workdir}"]):
        assert "data.seed" in refused(*command, "--config.data.seed=5", started=True)
    other = write_rows(tmp_path / "train.jsonl", read_lines(own / "train.jsonl")[::-1])
    line = refused(*words, f"--config.data.files.train={other}", started=True)
    assert (
        "shows demonstrations from its training split: 12 examples, which differ from the 12"
        in line
    )
    assert "demos.samples" in refused(*words, "--config.demos.samples=2", started=True)


def spoiled(folder, tmp_path, change):
    """Copies an export and changes its metadata, sealed again."""
    shutil.copytree(folder, tmp_path / "spoiled")
    path = tmp_path / "spoiled/prompt.json"
    values = json.loads(path.read_text())
    change(values)
    write_card(path, values)
    return tmp_path / "spoiled"


@pytest.mark.parametrize("change, part", [
    (lambda card: card["demos"].pop("samples"), "demos.samples is missing"),
    (lambda card: card["demos"].update(samples=0), "demos.samples=0 must be at least 1"),
    (lambda card: card["demos"].update(examples=[]), "demos.examples is empty"),
    (lambda card: card["demos"]["examples"][0].update(label=7), "demos.examples has {'fields'"),
    (lambda card: card["demos"].update(fingerprint="0" * 64), "trained with 000000000000; restore"),
    (lambda card: card["demos"].update(encoder="nowhere/x"), "demos.encoder='nowhere/x': "),
])  # fmt: skip
def test_demonstrations_of_an_export_are_checked(change, part, exported, tmp_path, refused):
    folder = spoiled(exported[0] / "export", tmp_path, change)
    line = refused("predict", f"--prompt={folder}", "--text=the cat", started=True)
    assert part in line and line.count("\n") == 0, line


@pytest.mark.long
def test_the_sentence_encoder_may_stand_elsewhere(
    exported, encoder, backbone, tmp_path, capsys, refused
):
    """By a flag of predict, and by attach."""
    import jaxprompt as jp

    def predict(folder, *words):
        code, out, err = jaxprompt(
            capsys, "predict", f"--prompt={folder}", "--text=the old cat", *words
        )
        assert code == 0, err
        return json.loads(out)

    folder = exported[0] / "export"
    moved = shutil.copytree(encoder, tmp_path / "moved")
    gone = spoiled(folder, tmp_path, lambda card: card["demos"].update(encoder="nowhere/x"))
    expected = predict(folder)
    assert predict(gone, f"--sentence-encoder={moved}") == expected
    prompt = jp.load_prompt(str(gone))
    model = jp.attach(jp.load_backbone(str(backbone)), prompt, sentence_encoder=str(moved))
    (found,) = jp.predict(model, ["the old cat"])
    assert found["prediction"] == expected["prediction"]
    words = [f"--prompt={gone}", "--text=x", f"--sentence-encoder={backbone}"]
    assert "the prompt was trained with" in refused("predict", *words, started=True)
    alone = spoiled(folder, tmp_path / "alone", lambda card: card.pop("demos"))
    words = [f"--prompt={alone}", "--text=x", f"--sentence-encoder={moved}"]
    line = refused("predict", *words, started=True)
    assert "is not needed, because the prompt does not compare sentences" in line


# -- where they meet other parts ------------------------------------------------------------------


@pytest.mark.long
def test_runs_that_train_as_one_program_score_as_alone(backbone, data, tmp_path, capsys):
    fields = dict(
        demos__per_class=1, demos__samples=2, train__total_steps=4, train__eval_steps=2,
        prompt__dropout=0, data__batch=6, data__max_len=60,
    )  # fmt: skip
    alone = prepare(backbone, data, "prefix", **fields, optim__lr=0.02)
    flag = write(alone, tmp_path)
    code, out, err = jaxprompt(capsys, "train", flag, f"--workdir={tmp_path / 'alone'}")
    assert code == 0, err
    expected = json.loads(out)
    grid = [flag, f"--workdir={tmp_path / 'grid'}", "--config.runs.lr=0.01,0.02"]
    code, _, err = jaxprompt(capsys, "train", *grid)
    assert code == 0, err
    paths = list((tmp_path / "grid").glob("*/result.json"))
    found = {path.parent.name: json.loads(path.read_text()) for path in paths}
    (same,) = (own for name, own in found.items() if "0.02" in name)
    assert len(found) == 2 and (same["dev"], same["test"]) == (expected["dev"], expected["test"])


@pytest.mark.long
def test_a_decoder_that_shows_them_writes_too(data, tmp_path, capsys):
    folder = make_backbone(tmp_path / "gpt2", "gpt2")
    fields = dict(
        task__template="{text} about [mask]", demos__per_class=1, demos__samples=2,
        train__total_steps=1, train__eval_steps=1, generate__max_new_tokens=3, data__max_len=60,
    )  # fmt: skip
    c = prepare(folder, data, "prefix", **fields)
    flag, workdir = write(c, tmp_path), tmp_path / "run"
    assert jaxprompt(capsys, "train", flag, f"--workdir={workdir}")[0] == 0
    assert jaxprompt(capsys, "export", f"--workdir={workdir}")[0] == 0
    words = ["--generate", "--text=the cat", "--text=old bread"]
    code, out, err = jaxprompt(capsys, "predict", f"--workdir={workdir}", *words)
    assert code == 0, err
    assert [set(json.loads(line)) for line in out.splitlines()] == [{"text", "generated"}] * 2


@pytest.mark.long
def test_a_plan_and_a_check_know_them(backbone, data, tmp_path, capsys):
    c = prepare(
        backbone, data, "prefix", demos__per_class=1, demos__samples=3, train__total_steps=1,
        data__max_len=60,
    )  # fmt: skip
    code, out, err = jaxprompt(capsys, "validate", write(c, tmp_path))
    assert code == 0, err
    assert "demonstrations: 1 of each class of 12 examples, 3 samples" in out
    assert "train 12, dev 9, test 24" in out and "labels in train: 0 = beast (4)" in out
    first = next(line for line in out.splitlines() if "the first example" in line)
    assert first.count("[SEP]") == 4 and first.count("[MASK]") == 1
    code, out, err = jaxprompt(capsys, "plan", f"--config={tmp_path / 'config.json'}")
    assert code == 0 and "as configured" in out, err
