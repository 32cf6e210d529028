"""Every objective of `adapt`, from a folder of text to a backbone that torch scores alike."""

import json
import math
import shutil
import zlib

import jax
import numpy as np
import pytest
import transformers
from tiny_adapt import (
    CASES,
    HELD_OUT,
    LENGTH,
    SCORED,
    STEPS,
    adapt,
    adapted,
    held_out,
    losses,
    made,
    scores,
    words_of,
)
from tiny_run import VOCAB, jaxprompt, read_lines

from jaxprompt import rng
from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.corpus import split_held_out
from jaxprompt.corpus.denoise import rtd
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.runs.replaced_tokens import make_pair, untie_embeddings

torch = pytest.importorskip("torch")

CLASSES = {
    "mlm": "AutoModelForMaskedLM", "rtd": "ElectraForPreTraining", "clm": "AutoModelForCausalLM",
    "prefix_lm": "T5ForConditionalGeneration", "span_corruption": "T5ForConditionalGeneration",
}  # fmt: skip
NEW_HEADS = {"mlm-roberta": "mlm", "rtd-electra": "rtd"}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A case's name and the workdir of its run."""
    return request.param, adapted(tmp_path_factory, request.param)


# -- what a run leaves ----------------------------------------------------------------------------


@pytest.mark.default_cases("mlm-bert")
def test_it_learns_held_out_text_and_reports_the_best_evaluation(case):
    name, workdir = case
    result, dev = json.loads((workdir / "result.json").read_text()), scores(workdir)
    lines = [line for line in read_lines(workdir / "metrics.jsonl") if "loss" in line]
    learning_rate = 0.1 if name == "span_corruption-t5" else 1e-2
    assert [line["lr"] for line in lines] == pytest.approx([learning_rate] * STEPS)
    assert np.isfinite([line["loss"] for line in lines]).all() and len(dev) == STEPS // SCORED
    assert np.mean(losses(workdir)[-3:]) < 0.95 * np.mean(losses(workdir)[:2])
    loss = "generator_loss" if name.startswith("rtd") else "loss"
    assert dev[-1][loss] < dev[0][loss] - 0.05 and "accuracy" in dev[0]
    best = min(range(len(dev)), key=lambda i: dev[i]["loss"])
    assert result["held_out"] == dev[best] and result["best_step"] == (best + 1) * SCORED
    assert result["objective"] == CASES[name].objective and result["steps"] == STEPS
    assert result["skipped"] == 0
    card = (workdir / "backbone/README.md").read_text()
    assert "60 documents" in card and f"| steps | {STEPS} |" in card
    assert f"{result['held_out']['loss']:.6g}" in card
    files = {file.name: zlib.crc32(file.read_bytes()) for file in workdir.glob("corpus/*/*.bin")}
    assert len(files) == 3
    assert json.loads((workdir / "record.json").read_text())["store"] == files


# -- torch ----------------------------------------------------------------------------------------


def read_torch(folder, name):
    """Loads a folder with transformers, whose tensors are exactly those of the model."""
    torch.set_num_threads(1)
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def torch_logits(model, batch, **changes):
    """Runs a torch model on a batch; torch counts the positions."""
    inputs = dict(input_ids=batch.encoder.ids, attention_mask=batch.encoder.mask) | changes
    if batch.decoder is not None:
        inputs |= dict(decoder_input_ids=batch.decoder.ids)
    with torch.no_grad():
        return model(**{name: torch.tensor(x).long() for name, x in inputs.items()}).logits


@pytest.mark.default_cases("mlm-bert")
def test_torch_scores_the_held_out_rows_alike(case, tmp_path_factory):
    name, workdir = case
    objective, prefix = CASES[name].objective, ""
    model = read_torch(workdir / "backbone", CLASSES[objective])
    if objective == "rtd":  # the discriminator is compared below
        prefix, model = "generator_", read_torch(workdir / "generator", "AutoModelForMaskedLM")
    batches, sums = list(held_out(workdir)), np.zeros(3)
    assert sum(batch.weights.sum() for batch in batches) > 12  # packed: fewer rows than texts / 24
    for batch in batches:
        rows, columns = np.nonzero(batch.targets >= 0)
        logits = torch_logits(model, batch)[rows, batch.label_pos[rows, columns]]
        targets = torch.tensor(batch.targets[rows, columns]).long()
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        sums += [loss.item(), len(targets), (logits.argmax(-1) == targets).sum().item()]
    result = json.loads((workdir / "result.json").read_text())["held_out"]
    assert result[f"{prefix}loss"] == pytest.approx(sums[0] / sums[1], abs=1e-4)
    assert result[f"{prefix}accuracy"] == pytest.approx(sums[2] / sums[1])
    assert result[f"{prefix}perplexity"] == pytest.approx(np.exp(sums[0] / sums[1]), rel=1e-3)

    source = load_tokenizer(made(tmp_path_factory, CASES[name].kind))
    text = "the cat was near a red bear. zq 不"
    for folder in ("backbone", "generator") if objective == "rtd" else ("backbone",):
        saved = load_tokenizer(workdir / folder)
        assert type(saved) is type(source) and saved.get_vocab() == source.get_vocab()
        assert saved(text)["input_ids"] == source(text)["input_ids"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(workdir / folder)
        assert len(tokenizer(text)["input_ids"]) > 8


def load_pair(workdir):
    """Reads both folders of a run by our names. -> (pair, parameters)"""
    modules, params = [], {}
    for folder, part, head in (("generator", "generator", "mlm"), ("backbone", "backbone", "rtd")):
        hf = read_config(workdir / folder)
        family = hf["model_type"]
        loaded = load_backbone(workdir / folder, family, hf).params
        params[part] = jax.tree.map(jax.numpy.asarray, loaded)
        modules.append(make_backbone(family, hf, (head,), dtype="float32", dropout=0.0))
    return make_pair(*modules), params | {"generator": untie_embeddings(params["generator"])}


@pytest.mark.long
def test_torch_finds_the_replaced_tokens_alike(tmp_path_factory):
    """The same draws: the discriminator reads what the generator put in."""
    workdir = adapted(tmp_path_factory, "rtd-electra")
    pair, params = load_pair(workdir)
    discriminator = read_torch(workdir / "backbone", "ElectraForPreTraining")
    draw = jax.jit(
        lambda batch, key: pair.forward(params, batch, head="generator", key=key).sampled
    )
    base, sums = rng.key_for(0, "held out"), np.zeros(4)
    for number, batch in enumerate(held_out(workdir)):
        key = jax.random.fold_in(jax.random.fold_in(base, number), 0)
        drawn = np.asarray(draw(batch, key))
        ids, labels = rtd.replace_masks(batch.encoder.ids, batch.label_pos, batch.targets, drawn)
        logits = torch_logits(discriminator, batch, input_ids=ids)
        labels, mask = torch.tensor(labels).float(), torch.tensor(batch.encoder.mask)
        each = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, labels, reduction="none"
        )
        hits = (logits > 0) == (labels > 0)
        sums += [float(x) for x in (each[mask].sum(), mask.sum(), hits[mask].sum(), labels.sum())]
    result = json.loads((workdir / "result.json").read_text())["held_out"]
    assert result["loss"] == pytest.approx(sums[0] / sums[1], abs=1e-4)
    assert result["accuracy"] == pytest.approx(sums[2] / sums[1])
    assert result["majority"] == pytest.approx(1 - sums[3] / sums[1])


# -- where it starts ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlm-roberta", "rtd-electra", "clm-gpt2", "prefix_lm-t5"])
def test_newly_initialized_heads_are_logged(name, tmp_path_factory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxprompt.training.loop.train_loop", lambda *_: None)
    code, out, err = jaxprompt(capsys, *words_of(tmp_path_factory, name, tmp_path / "run"))
    assert code == 0 and out == ""
    new = [line for line in err.splitlines() if line.startswith("randomly initialised")]
    assert new == ([f"randomly initialised: {NEW_HEADS[name]}"] if name in NEW_HEADS else [])
    assert f"{CASES[name].objective}: {STEPS} steps, starting at step 0" in err


@pytest.mark.long
def test_a_config_and_a_tokenizer_are_enough(tmp_path_factory, tmp_path, capsys):
    """The weights are drawn; what cannot be read of the text is left out and counted."""
    corpus = tmp_path / "corpus"
    shutil.copytree(made(tmp_path_factory, "corpus"), corpus)
    (corpus / "bad.txt").write_bytes(b"the caf\xe9")
    alone = tmp_path / "config"  # the tokenizer lies elsewhere
    alone.mkdir()
    init = shutil.copy(made(tmp_path_factory, "bert") / "config.json", alone)
    changes = dict(
        backbone__path=made(tmp_path_factory, "bert"), backbone__init=init, train__total_steps=2,
        corpus__path=corpus, corpus__on_error="skip", objective__packed=False,
        objective__examples=3,
    )  # fmt: skip
    words = words_of(tmp_path_factory, "mlm-bert", tmp_path / "run", **changes)
    code, out, err = jaxprompt(capsys, *words)
    assert code == 0 and "randomly initialised: mlm" in err
    assert "1 documents were skipped, the first: " in err and "bad.txt: not UTF-8" in err
    assert len((tmp_path / "run/examples.txt").read_text().split("\n\n")) == 1 + 3
    first = losses(tmp_path / "run")[0]
    assert first == pytest.approx(math.log(len(VOCAB)), rel=0.2)  # nothing is known yet
    # Not packed, a row has one piece: words are tokens, and two specials stand around them.
    counts = [len(row["text"].split()) for row in read_lines(corpus / "corpus.jsonl")]
    train, _ = split_held_out(len(counts), HELD_OUT, 0)
    rows = sum(math.ceil(counts[document] / (LENGTH - 2)) for document in train)
    assert f"60 documents, {sum(counts):,} tokens; {rows} sequences of {LENGTH} tokens, " in err


@pytest.mark.long
def test_separate_documents_have_another_first_loss(tmp_path_factory, tmp_path):
    changes = dict(objective__separate_documents=True, train__total_steps=1)
    separate = losses(adapt(tmp_path_factory, "mlm-bert", tmp_path / "run", **changes))[0]
    assert abs(separate - losses(adapted(tmp_path_factory, "mlm-bert"))[0]) > 1e-3


# -- how it runs ----------------------------------------------------------------------------------
