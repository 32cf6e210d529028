"""Demonstrations from a config to predictions: trained with, in context, and from an export."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from spoil import write_card
from tiny_run import (
    TOPICS,
    flags,
    make_backbone,
    make_config,
    predict,
    read_lines,
    serve,
    succeed,
    train_and_export,
    write_rows,
)
from transformers import AutoTokenizer, BertForMaskedLM, BertModel, LlamaForCausalLM

from jaxprompt import tree
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.build.sentence_encoder import SentenceEncoder, cosine
from jaxprompt.data.tasks.task import Example
from jaxprompt.errors import InputError
from jaxprompt.runs.restore import restore_run
from jaxprompt.serving.answers import make_answers

torch = pytest.importorskip("torch")

NAMES = list(TOPICS)
ABOUT = {
    "head.name": "verbalizer", "task.template": "{text} about [mask] .",
    "task.labels": ",".join(NAMES), "data.max_len": 64, "data.multiple": 16,
    "data.protocol": "kshot", "data.protocol.k": 4, "data.protocol.dev_k": 3,
    "backbone.dropout": 0.0,
}  # fmt: skip


def prepare(backbone, data, method, **fields):
    about = {name.replace(".", "__"): value for name, value in ABOUT.items()}
    return make_config(backbone, data, method, **about | fields)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama for longer texts."""
    folder = make_backbone(tmp_path_factory.mktemp("llama") / "llama", "llama")
    config = json.loads((folder / "config.json").read_text()) | dict(max_position_embeddings=160)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(config, folder):
    """Saves a config. -> its flag"""
    path = folder / "config.json"
    path.write_text(config.to_json())
    return f"--config={path}"


def evaluate(capsys, *flags):
    out, _ = succeed(capsys, "evaluate", "--split=test", *flags)
    return json.loads(out)


def torch_scores(backbone, texts):
    """Scores the topics at the mask of each text. -> logits [texts, 3]"""
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    model = BertForMaskedLM.from_pretrained(backbone).eval()
    words = tokenizer.convert_tokens_to_ids(NAMES)
    scores = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            logits = model(**ids).logits[ids["input_ids"] == tokenizer.mask_token_id]
        scores.append(logits[0, words].numpy())
    return np.array(scores)


@pytest.mark.long
@pytest.mark.parametrize("fields", [
    {"demos__per_class": 1, "demos__samples": 3}, {"demos__total": 4, "demos__samples": 2},
])  # fmt: skip
def test_in_context_is_the_mean_of_what_torch_gives(fields, backbone, data, tmp_path, capsys):
    """The texts are written out here; which are shown is taken from the run."""
    config = prepare(backbone, data, "zero_shot", **fields)
    flag, out = write(config, tmp_path), tmp_path / "out.jsonl"
    metrics = evaluate(capsys, flag, f"--output={out}")
    trained = restore_run(config, None, ["test"])
    gold = read_lines(data / "test.jsonl")
    samples = trained.scorer.demos.sample([Example({"text": row["text"]}) for row in gold])
    expected = []
    for row, shown in zip(gold, samples, strict=True):
        texts = []
        for demos in shown:
            parts = [f"{d.fields['text']} about {NAMES[d.label]} ." for d in demos]
            query = f"{row['text']} about [MASK] ."
            parts = [*parts, query] if "demos__total" in fields else [query, *parts]
            texts.append(" [SEP] ".join(parts))
        expected.append(torch_scores(backbone, texts).mean(0))
    expected = torch.tensor(np.array(expected)).softmax(-1).numpy()
    lines = read_lines(out)
    scores = np.array([[line["scores"][name] for name in NAMES] for line in lines])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    best = [NAMES[index] for index in expected.argmax(-1)]
    right = np.mean([name == row["label"] for name, row in zip(best, gold, strict=True)])
    assert metrics["accuracy"] == pytest.approx(right) and metrics["examples"] == len(gold)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT that compares sentences, of other weights than the backbone's."""
    return make_backbone(tmp_path_factory.mktemp("sentences") / "bert", seed=5)


SENTENCES = ["the cat was near a dog", "bread", "an old saw with the hammer", "cake, rice"]


def torch_embeddings(folder, texts):
    tokenizer, means = AutoTokenizer.from_pretrained(folder), []
    model = BertModel.from_pretrained(folder).eval()
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        means.append(states[0].mean(0).numpy())
    return np.array(means, np.float64)


def test_sentences_are_compared_as_in_torch(encoder):
    embeddings = SentenceEncoder(str(encoder)).embed(SENTENCES)
    expected = torch_embeddings(encoder, SENTENCES)
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-5)
    unit = expected / np.sqrt((expected**2).sum(-1, keepdims=True))
    cosines = cosine(embeddings, embeddings[:2])
    np.testing.assert_allclose(cosines, unit @ unit[:2].T, atol=1e-5)


def test_a_deberta_compares_texts_cut_to_what_it_was_trained_on(tmp_path):
    """It reads texts of any length."""
    folder = make_backbone(tmp_path / "deberta", "deberta_v2")
    trained = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    encoder = SentenceEncoder(str(folder))
    rows = encoder.embed(["the cat " * trained, "the cat " * 2 * trained, "the rice"])
    assert encoder._max_len == trained
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-5)
    assert np.abs(rows[0] - rows[2]).max() > 1e-3


def test_a_decoder_compares_no_sentences(llama):
    with pytest.raises(InputError, match="is a llama; use a BERT"):
        SentenceEncoder(str(llama))


def test_the_most_similar_half_is_shown(backbone, data, encoder):
    config = prepare(
        backbone, data, "zero_shot", demos__per_class=1, demos__samples=60, demos__similar=0.5,
        demos__encoder=str(encoder),
    )  # fmt: skip
    demos = restore_run(config, None, ["test"]).scorer.demos
    queries = [row["text"] for row in read_lines(data / "test.jsonl")][:5]
    pool = torch_embeddings(encoder, [demo.fields["text"] for demo in demos.pool])
    labels = np.array([demo.label for demo in demos.pool])
    samples = demos.sample([Example({"text": text}) for text in queries])
    for sampled, query in zip(samples, torch_embeddings(encoder, queries), strict=True):
        near = pool @ query / np.sqrt((pool**2).sum(1) * (query @ query))
        for label in range(3):
            rows = np.flatnonzero(labels == label)
            best = rows[np.argsort(-near[rows])[:2]]  # of 4 of the class
            shown = {demos_of_one[label].fields["text"] for demos_of_one in sampled}
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
    config = prepare(backbone, data, method, **fields)
    _, workdir, expected, log = serve(capsys, tmp_path, config, data / "test.jsonl")
    assert "demonstrations: 1 of each class, from 12 examples, among the most similar 0.5" in log
    assert "train 12, dev 9, test 24" in log
    # In another order and in other batches: what is shown depends on the text alone.
    turned = write_rows(tmp_path / "turned.jsonl", read_lines(data / "test.jsonl")[::-1])
    rows, _ = predict(capsys, workdir, f"--input={turned}", "--batch=5")
    for row, other in zip(rows[::-1], expected, strict=True):
        assert row["scores"] == pytest.approx(other["scores"], abs=2e-6)
    demos = read_export(str(workdir / "export"))[1].demos
    assert len(demos.examples) == 12 and demos.samples == 2
    shown = {demo.fields["text"] for demo in demos.examples}
    assert shown < {row["text"] for row in read_lines(data / "train.jsonl")}


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_llama_reads_exactly_so_many(count, llama, data, tmp_path, capsys):
    """Each line of its input is written out here; without any it is the text alone."""
    fields = dict(task__template="{text} about [mask]", data__max_len=128)
    config = prepare(llama, data, "zero_shot", **fields, demos__exact=count)
    scorer = restore_run(config, None, ["test"]).scorer
    out = tmp_path / "out.jsonl"
    evaluate(capsys, write(config, tmp_path), f"--output={out}")
    tokenizer, words = scorer.tokenizer, [f" {name}" for name in NAMES]
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words]
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    labels = {row["text"]: row["label"] for row in read_lines(data / "train.jsonl")}
    orders = set()
    for line in read_lines(out)[:5]:
        example = Example({"text": line["text"]})
        (row,) = scorer.encode([example]).rows
        *shown, query = tokenizer.decode(row[0].ids).removeprefix("<s>").split("\n")
        assert query == f"{line['text']} about" and len(set(shown)) == count
        for demo in shown:
            text, label = demo.split(" about ")
            assert labels[text] == label
        orders.add(tuple(shown))
        start = tokenizer("\n".join([*shown, query]))["input_ids"]
        assert row[0].ids.tolist() == start
        with torch.no_grad():
            last = model(torch.tensor([start])).logits[0, -1]
        scores = [line["scores"][name] for name in NAMES]
        np.testing.assert_allclose(scores, last[words].softmax(-1), rtol=0, atol=1e-5)
    assert (len(orders) == 1) == (count == 0)
    again = restore_run(config.replace({"data.seed": config.data.seed + 1}), None, ["test"]).scorer
    same = [s.encode([example]).rows[0][0].ids.tolist() for s in (scorer, again)]
    assert (same[0] == same[1]) == (count == 0)


def test_texts_are_written_behind_demonstrations(llama, data):
    """As torch goes on behind the examples of one sample and the text."""
    fields = dict(task__template="{text} about [mask]", data__max_len=128, demos__samples=2)
    config = prepare(llama, data, "zero_shot", **fields, demos__exact=2)
    trained = restore_run(config, None, ["test"])
    scorer = trained.scorer.writing(3)
    generation = dataclasses.replace(config.generate, max_new_tokens=3)
    answer = make_answers(scorer, generation=generation, placement=trained.placement)
    params = tree.merge(trained.weights.trainable, trained.weights.frozen)
    examples = [Example({"text": "the old cat was near"}), Example({"text": "a saw"})]
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    for example, columns in zip(examples, answer(params, examples).columns, strict=True):
        (rows,) = scorer.encode([example]).rows
        (ids,) = [row.ids for row in rows]
        *shown, query = scorer.tokenizer.decode(ids).removeprefix("<s>").split("\n")
        assert len(shown) == 2 and query.startswith(example.fields["text"])
        with torch.no_grad():
            written = model.generate(torch.tensor(ids[None]), max_new_tokens=3, do_sample=False)
        expected = scorer.tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)
        assert columns["generated"] == expected.strip()


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, fields, message", [
    ("full", {"demos.per_class": 1, "demos.exact": 4}, "demos.per_class=1 and demos.exact=4"),
    ("full", {"demos.per_class": 5}, "class 'beast' has 4 training examples"),
    ("full", {"demos.exact": 13}, "demos.exact=13, but there are 12 training examples"),
    ("full", {"demos.total": 2, "demos.similar": 0}, "demos.similar=0.0 must be in (0, 1]"),
    ("full", {"demos.per_class": 1, "demos.similar": 0.5, "demos.encoder": "nowhere/at/all"},
     "demos.encoder='nowhere/at/all': "),
    ("full", {"demos.per_class": 1, "task.form": "nss", "task.template": ""},
     "demos.per_class=1 shows examples of each class"),
    ("soft", {"demos.total": 2, "prompt.length": 4, "task.entities": "<a>|</a>,<b>|</b>",
              "task.template": "{text|soft} [mask]"}, "without |soft"),
])  # fmt: skip
def test_what_does_not_fit_is_named(method, fields, message, backbone, data, tmp_path, refused):
    flag = write(prepare(backbone, data, method), tmp_path)
    words = [flag, f"--workdir={tmp_path / 'w'}", *flags(fields)]
    assert message in refused("train", *words, started=True)


@pytest.fixture(scope="module")
def exported(backbone, data, encoder, tmp_path_factory):
    """The export of a prefix that was trained with demonstrations. -> workdir, its data"""
    from jaxprompt.__main__ import main

    root = tmp_path_factory.mktemp("shown")
    rows = shutil.copytree(data, root / "data")
    config = prepare(
        backbone, rows, "prefix", demos__per_class=1, demos__similar=0.5,
        demos__encoder=str(encoder), train__total_steps=2, train__eval_steps=2, data__max_len=60,
    )  # fmt: skip
    assert main(["train", write(config, root), f"--workdir={root / 'run'}"]) == 0
    assert main(["export", f"--workdir={root / 'run'}"]) == 0
    return root / "run", rows


def test_relations_are_shown_by_the_names_of_their_entities(backbone, tmp_path, capsys):
    rows = [
        {"text": f"the <e1>{name}</e1> was {word} <e2>it</e2>", "label": label}
        for word in ("near", "very", "a", "this")
        for name, label in (("cat", "yes"), ("bread", "no"))
    ]
    for split in ("train", "dev", "test"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    config = prepare(
        backbone, tmp_path, "zero_shot", demos__per_class=1, demos__samples=2,
        task__fields="text", task__entities="<e1>|</e1>,<e2>|</e2>", task__labels="yes,no",
        task__words="beast,food", task__negative="no", task__metric="micro_f1",
        task__template="{text} {entity1} is the [mask] of {entity2}", data__protocol__k=2,
        data__protocol__dev_k=2,
    )  # fmt: skip
    metrics = evaluate(capsys, write(config, tmp_path))
    assert metrics["examples"] == 8 and {"micro_f1", "precision", "recall"} <= metrics.keys()


@pytest.mark.long
def test_the_sentence_encoder_may_have_moved(
    exported, encoder, backbone, refused, tmp_path, capsys
):
    """Another one, or other demonstrations of the same examples, are refused."""
    workdir, _ = exported
    line = refused("evaluate", f"--workdir={workdir}", "--config.data.seed=5", started=True)
    assert "data.seed" in line

    def answer(folder, *words):
        out, _ = succeed(capsys, "predict", f"--prompt={folder}", "--text=the old cat", *words)
        return json.loads(out)

    moved = shutil.copytree(encoder, tmp_path / "moved")
    gone = shutil.copytree(workdir / "export", tmp_path / "gone")
    card = json.loads((gone / "prompt.json").read_text())
    card["demos"]["encoder"] = "nowhere/x"
    write_card(gone / "prompt.json", card)
    assert answer(gone, f"--sentence-encoder={moved}") == answer(workdir / "export")
    words = ["predict", f"--prompt={gone}", "--text=x"]
    assert "demos.encoder='nowhere/x': " in refused(*words, started=True)
    line = refused(*words, f"--sentence-encoder={backbone}", started=True)
    assert "the prompt was trained with" in line


@pytest.mark.long
def test_each_example_is_counted_once_in_a_confusion_matrix(backbone, data, tmp_path, capsys):
    """Not once a sample."""
    fields = dict(
        demos__per_class=1, demos__samples=2, train__total_steps=2, train__eval_steps=2,
        data__max_len=60,
    )  # fmt: skip
    config = prepare(backbone, data, "prefix", **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, config)
    succeed(capsys, "inspect", f"--workdir={workdir}", "--split=test")
    report = json.loads((workdir / "inspect/inspect.json").read_text())
    counts = np.array(report["confusion"]["counts"])
    assert counts.sum() == 24
    assert counts.trace() / 24 == pytest.approx(result["test"]["accuracy"])
    assert any("first demonstrations" in line for line in report["remarks"])
