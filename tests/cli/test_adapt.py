"""Every objective of `adapt`, from a folder of text to a backbone that torch scores alike."""

import json
import math
import shutil
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
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
from tiny_run import VOCAB, flags, jaxprompt, read_lines, tiny_fields

from jaxprompt import rng
from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.corpus import divide
from jaxprompt.corpus.denoise import rtd
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.runs.replaced_tokens import make_pair, untie_embeddings

CLASSES = {
    "mlm": "AutoModelForMaskedLM", "rtd": "ElectraForPreTraining", "clm": "AutoModelForCausalLM",
    "prefix_lm": "T5ForConditionalGeneration", "span_corruption": "T5ForConditionalGeneration",
}  # fmt: skip
FRESH = {
    "mlm-roberta": "mlm", "rtd-electra": "rtd", "rtd-bert": "rtd", "span_corruption-t5": "lm",
}  # fmt: skip


@pytest.fixture
def run(tmp_path_factory, tmp_path):
    """Runs a case with some fields changed. -> its workdir"""
    return lambda name, **changes: adapt(tmp_path_factory, name, tmp_path / "run", **changes)


@pytest.fixture(params=CASES)
def case(request, tmp_path_factory):
    """A case's name and the workdir of its run."""
    return request.param, adapted(tmp_path_factory, request.param)


# -- what a run leaves ----------------------------------------------------------------------------


def numbers(value) -> list[float]:
    """Lists the numbers in a record."""
    if isinstance(value, dict):
        return [x for part in value.values() for x in numbers(part)]
    assert isinstance(value, int | float), value  # what is not finite is written as a word
    return [value]


@pytest.mark.default_cases("mlm-bert")
def test_it_learns_held_out_text(case):
    name, workdir = case
    lines, dev = read_lines(workdir / "metrics.jsonl"), scores(workdir)
    assert all(math.isfinite(x) for line in lines for x in numbers(line))
    assert len(losses(workdir)) == STEPS and len(dev) == STEPS // SCORED
    fell = "generator_loss" if name.startswith("rtd") else "loss"
    assert dev[-1][fell] < dev[0][fell] - 0.05
    assert np.mean(losses(workdir)[-3:]) < 0.95 * np.mean(losses(workdir)[:2])
    assert set(dev[0]) >= {"loss", "accuracy"}


@pytest.mark.default_cases("mlm-bert")
def test_each_loss_has_its_learning_rate(case):
    lines = [line for line in read_lines(case[1] / "metrics.jsonl") if "loss" in line]
    rate = 0.1 if case[0] == "span_corruption-t5" else 1e-2
    assert [line["lr"] for line in lines] == pytest.approx([rate] * STEPS)


@pytest.mark.default_cases("mlm-bert")
def test_the_result_tells_the_best_look_at_it(case):
    name, workdir = case
    result, dev = json.loads((workdir / "result.json").read_text()), scores(workdir)
    best = min(range(len(dev)), key=lambda i: dev[i]["loss"])
    assert result["held_out"] == dev[best] and result["best_step"] == (best + 1) * SCORED
    assert result["objective"] == CASES[name].objective and result["steps"] == STEPS
    assert result["skipped"] == 0
    card = (workdir / "backbone/README.md").read_text()
    assert "60 documents" in card and f"| steps | {STEPS} |" in card
    assert f"{result['held_out']['loss']:.6g}" in card
    # The indexed text that it learned from, as it was written.
    files = {file.name: zlib.crc32(file.read_bytes()) for file in workdir.glob("corpus/*/*.bin")}
    assert len(files) == 3
    assert json.loads((workdir / "record.json").read_text())["store"] == files


@pytest.mark.default_cases("mlm-bert")
def test_the_tokenizer_goes_along(case, tmp_path_factory):
    from transformers import AutoTokenizer

    name, workdir = case
    source = load_tokenizer(made(tmp_path_factory, CASES[name].kind))
    text = "the cat was near a red bear. zq 不"
    for folder in ("backbone",) + ("generator",) * name.startswith("rtd"):
        saved = load_tokenizer(workdir / folder)
        assert type(saved) is type(source) and saved.get_vocab() == source.get_vocab()
        assert saved(text)["input_ids"] == source(text)["input_ids"]
        assert len(AutoTokenizer.from_pretrained(workdir / folder)(text)["input_ids"]) > 8


# -- torch ----------------------------------------------------------------------------------------


def read_torch(folder, name):
    """Reads a folder; all of its tensors have a place, and every place a tensor."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.set_num_threads(1)
    model, told = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def run_torch(model, batch, **changes):
    """Runs a torch model on a batch, whose positions are torch's own. -> logits"""
    torch = pytest.importorskip("torch")

    tokens = batch.encoder
    given = dict(input_ids=tokens.ids, attention_mask=tokens.mask) | changes
    if batch.decoder is not None:
        given |= dict(decoder_input_ids=batch.decoder.ids)
    with torch.no_grad():
        return model(**{name: torch.tensor(x).long() for name, x in given.items()}).logits


def of_targets(logits, batch) -> tuple[float, int, int]:
    """Sums the loss over the targets of a batch. -> (sum, targets, hits)"""
    torch = pytest.importorskip("torch")

    there = batch.targets >= 0
    found = logits[np.nonzero(there)[0], batch.label_pos[there]]
    targets = torch.tensor(batch.targets[there]).long()
    total = torch.nn.functional.cross_entropy(found, targets, reduction="sum")
    return total.item(), len(targets), int((found.argmax(-1) == targets).sum())


@pytest.mark.default_cases("mlm-bert")
def test_torch_scores_the_held_out_rows_alike(case):
    name, workdir = case
    objective = CASES[name].objective
    models = {"": read_torch(workdir / "backbone", CLASSES[objective])}
    if objective == "rtd":  # the discriminator stands below
        models = {"generator_": read_torch(workdir / "generator", "AutoModelForMaskedLM")}
    ((prefix, model),) = models.items()
    batches = list(held_out(workdir))
    assert sum(batch.weights.sum() for batch in batches) > 12  # packed: fewer rows than texts / 24
    sums = np.sum([of_targets(run_torch(model, batch), batch) for batch in batches], axis=0)
    result = json.loads((workdir / "result.json").read_text())["held_out"]
    assert result[f"{prefix}loss"] == pytest.approx(sums[0] / sums[1], abs=1e-4)
    assert result[f"{prefix}accuracy"] == pytest.approx(sums[2] / sums[1])
    assert result[f"{prefix}perplexity"] == pytest.approx(np.exp(sums[0] / sums[1]), rel=1e-3)


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
    torch = pytest.importorskip("torch")

    workdir = adapted(tmp_path_factory, "rtd-electra")
    pair, params = load_pair(workdir)
    discriminator = read_torch(workdir / "backbone", "ElectraForPreTraining")
    draw = jax.jit(lambda batch, key: pair.forward(params, batch, head="generator", key=key).drawn)
    base, sums = rng.key_for(0, "held out"), np.zeros(4)
    for number, batch in enumerate(held_out(workdir)):
        key = jax.random.fold_in(jax.random.fold_in(base, number), 0)
        drawn = np.asarray(draw(batch, key))
        ids, labels = rtd.replace(batch.encoder.ids, batch.label_pos, batch.targets, drawn)
        logits = run_torch(discriminator, batch, input_ids=ids)
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


@pytest.mark.long
def test_train_takes_the_folder(tmp_path_factory, tmp_path, data, capsys):
    workdir = adapted(tmp_path_factory, "mlm-bert")
    fields = tiny_fields(workdir / "backbone", data) | {"train.total_steps": 1}
    words = ["--config=configs/base.py", f"--workdir={tmp_path / 'run'}", *flags(fields)]
    code, out, err = jaxprompt(capsys, "train", *words)
    assert code == 0 and json.loads(out)["steps"] == 1
    assert "heads in the checkpoint: mlm" in err


# -- where it starts ------------------------------------------------------------------------------


@pytest.mark.default_cases("mlm-bert", "mlm-roberta", "rtd-electra", "clm-gpt2", "prefix_lm-t5")
@pytest.mark.parametrize("name", CASES)
def test_heads_that_are_drawn_are_said_to_be(name, tmp_path_factory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxprompt.training.loop.train", lambda *_: None)
    code, out, err = jaxprompt(capsys, *words_of(tmp_path_factory, name, tmp_path / "run"))
    assert code == 0 and out == ""
    said = [line for line in err.splitlines() if line.startswith("randomly initialised")]
    assert said == ([f"randomly initialised: {FRESH[name]}"] if name in FRESH else [])
    assert "60 documents, " in err and f" sequences of {LENGTH} tokens, " in err
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
    train, _ = divide(len(counts), HELD_OUT, 0)
    rows = sum(math.ceil(counts[document] / (LENGTH - 2)) for document in train)
    assert f"60 documents, {sum(counts):,} tokens; {rows} sequences of {LENGTH} tokens, " in err


@pytest.mark.long
def test_apart_a_document_is_read_alone(tmp_path_factory, run):
    """Weights and text are the same: the first loss tells."""
    mixed = losses(adapted(tmp_path_factory, "mlm-bert"))[0]
    apart = losses(run("mlm-bert", objective__separate_documents=True, train__total_steps=1))[0]
    assert abs(apart - mixed) > 1e-3


# -- how it runs ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_batch_in_parts_is_the_batch(tmp_path_factory, run):
    whole = run("mlm-bert", optim__accumulate=1, train__total_steps=SCORED)
    parts = adapted(tmp_path_factory, "mlm-bert")
    np.testing.assert_allclose(losses(whole), losses(parts)[:SCORED], rtol=1e-5)
    assert scores(whole)[0] == pytest.approx(scores(parts)[0], rel=1e-5)


@pytest.mark.long
def test_bfloat16_computes_and_float32_is_kept(tmp_path_factory, run):
    workdir = run("mlm-bert", backbone__dtype="bfloat16", train__total_steps=2 * SCORED)
    exact, dev = adapted(tmp_path_factory, "mlm-bert"), scores(workdir)
    assert dev[-1]["loss"] < dev[0]["loss"] - 0.05
    found, expected = losses(workdir), losses(exact)[: 2 * SCORED]
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert np.abs(np.subtract(found, expected)).max() > 1e-4
    for name, x in load_file(workdir / "backbone/model.safetensors").items():
        assert x.dtype == np.float32
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        if "LayerNorm.weight" not in name and np.abs(x).max() > 0:
            assert (rounded != x).mean() > 0.5, name
