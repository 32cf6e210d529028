"""Every objective of `adapt`, from a folder of text to a backbone that torch scores alike."""

import json
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from processes import Processes
from replaced_tokens import replace_masks
from spoil import BASE
from tiny_adapt import (
    CASES,
    SCORED,
    STEPS,
    adapt,
    adapted,
    held_out,
    made,
    make_corpus,
    scores,
    tiny_fields,
    words_of,
)
from tiny_pretrain import kill, stop
from tiny_run import ROOT, flags, losses, read_lines, succeed, timeless

from jaxprompt import rng
from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
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
        sampled = np.asarray(draw(batch, key))
        ids, labels = replace_masks(batch.encoder.ids, batch.label_pos, batch.targets, sampled)
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
    out, err = succeed(capsys, *words_of(tmp_path_factory, name, tmp_path / "run"))
    assert out == ""
    new = [line for line in err.splitlines() if line.startswith("randomly initialised")]
    assert new == ([f"randomly initialised: {NEW_HEADS[name]}"] if name in NEW_HEADS else [])
    assert f"{CASES[name].objective}: {STEPS} steps, starting at step 0" in err


@pytest.mark.long
def test_separate_documents_have_another_first_loss(tmp_path_factory, tmp_path):
    changes = dict(objective__separate_documents=True, train__total_steps=1)
    separate = losses(adapt(tmp_path_factory, "mlm-bert", tmp_path / "run", **changes))[0]
    assert abs(separate - losses(adapted(tmp_path_factory, "mlm-bert"))[0]) > 1e-3


# -- how it runs ----------------------------------------------------------------------------------


# -- bad input ------------------------------------------------------------------------------------

REFUSED = [
    ("mlm", "bert", {"corpus.path": ""}, "corpus.path is empty"),
    ("mlm", "bert", {"backbone.path": ""}, "backbone.path is empty"),
    ("mlm", "bert", {"corpus.held_out": 0}, "corpus.held_out=0 "),
    ("mlm", "bert", {"objective.name": "mln"}, "objective.name='mln'; nearest: mlm"),
    ("mlm", "bert", {"optim.label_smoothing": 0.1}, "optim.label_smoothing=0.1 has no effect"),
    ("mlm", "bert", {"cache.location": "host"}, "cache.location=host has no effect"),
    ("mlm", "bert", {"corpus.on_error": "ignore"}, "corpus.on_error='ignore' is unknown"),
    # Heads that a backbone lacks.
    ("clm", "bert", {}, "objective.name=clm does not work with a bert; use mlm, rtd"),
    ("mlm", "gpt2", {}, "objective.name=mlm does not work with a gpt2; use clm"),
    ("mlm", "t5-v1.1", {}, "does not work with a t5; use prefix_lm, span_corruption"),
    ("span_corruption", "bert", {}, "objective.name=span_corruption does not work with a bert"),
    ("rtd", "roberta-trunk", {}, "contains a roberta"),
    ("rtd", "gpt2", {}, "objective.name=rtd does not work with a gpt2; use clm"),
    # Rows and meshes that do not fit; a RoBERTa's first position is the third.
    ("mlm", "bert", {"data.max_len": 80}, "data.max_len=80 exceeds the 66 positions"),
    ("mlm", "roberta-trunk", {"data.max_len": 66}, "data.max_len=66 exceeds the 64 positions"),
    ("mlm", "bert", {"data.max_len": 2}, "data.max_len=2 leaves no room"),
    ("mlm", "bert", {"mesh.data": 8, "data.batch": 12}, "data.batch=12 is not divisible by mesh."),
    ("mlm", "bert", {"mesh.model": 4}, "mesh.model=4 does not divide the 2 of backbone/layers/"),
    ("rtd", "electra", {"mesh.model": 2}, "does not divide the 1 of generator/layers/"),
    # Settings reach the tokenizer and the reader.
    ("span_corruption", "t5-v1.1", {"backbone.sentinel": "<X{}>"}, "<X0>"),
    ("mlm", "bert", {"corpus.field": "txt"}, ":1: there is no field 'txt'; nearest: text"),
    ("mlm", "bert", {"corpus.max_document": 40}, ":1: a document of over 40 bytes"),
]


@pytest.mark.parametrize("objective, backbone, changes, message", REFUSED)
def test_what_is_refused(
    objective, backbone, changes, message, tmp_path_factory, tmp_path, refused
):
    fields = tiny_fields(made(tmp_path_factory, backbone), made(tmp_path_factory, "corpus"))
    config = f"--config={ROOT / f'configs/adapt/{objective}.py'}"
    words = [config, f"--workdir={tmp_path / 'new'}", *flags(fields | changes)]
    assert message in refused("adapt", *words)
    assert not (tmp_path / "new/config.json").exists()


def test_an_objective_is_needed(tmp_path, refused):
    words = [f"--config={BASE}", f"--workdir={tmp_path}", "--config.corpus.path=here"]
    assert "objective.name is empty; give one of mlm, rtd, clm" in refused("adapt", *words)


# -- several processes, and a run that is cut off -------------------------------------------------


def assert_same(workdir, alone) -> None:
    """Compares the loss of each step and the first scores, up to the order of sums."""
    assert len(losses(workdir)) == SCORED
    np.testing.assert_allclose(losses(workdir), losses(alone)[:SCORED], rtol=1e-5)
    assert scores(workdir) == [pytest.approx(scores(alone)[0], rel=1e-5)]


@pytest.mark.long
def test_two_processes_adapt_as_one(tmp_path_factory, tmp_path):
    """Of dev's last batch, which is short, the second has filling alone."""
    alone = adapted(tmp_path_factory, "mlm-bert")
    workdir = tmp_path / "run"
    words = words_of(tmp_path_factory, "mlm-bert", workdir, mesh__data=2, train__total_steps=SCORED)
    with Processes(tmp_path / "logs", devices=1) as processes:
        processes.start_all(2, ["-m", "jaxprompt", *words])
        assert processes.wait() == [0, 0], processes.told()
        assert json.loads(processes.out(0)) == json.loads((workdir / "result.json").read_text())
        assert processes.out(1) == "" and f"step {SCORED}/{SCORED}" in processes.err(0)
    assert_same(workdir, alone)
    assert (workdir / "backbone/model.safetensors").exists()
    assert not list(workdir.glob(".*.partial"))


def test_processes_compare_their_texts(tmp_path_factory, tmp_path, refused, monkeypatch):
    """What each of three would compare with the others: the last has a text that ends early."""
    words = words_of(tmp_path_factory, "mlm-bert", tmp_path / "run", corpus__path="text")
    compared = []

    def agree(facts):
        compared[-1].append(facts)
        if "the corpus" in facts:
            raise InputError("all is compared")

    monkeypatch.setattr("jaxprompt.parallel.processes.check_agreement", agree)
    for process, documents in enumerate((60, 60, 40)):
        folder = tmp_path / str(process)
        make_corpus(folder / "text", documents)
        monkeypatch.chdir(folder)
        compared.append([])
        assert refused(*words, started=True) == "all is compared"
    (config, record), same, (third, other) = compared
    assert same == [config, record] and third == config
    differing = {name for name in record if other[name] != record[name]}
    assert differing == {"the corpus", "the store"} and other.keys() == record.keys()
    assert not (tmp_path / "run/metrics.jsonl").exists()


KILLED, STOPPED = 8, 10  # SIGKILL once step 8 is saved, then SIGTERM
CASE = "span_corruption-t5"


def assert_same_end(workdir: Path, whole: Path) -> None:
    """Compares metrics, result and what is saved."""
    metrics = [[*map(timeless, read_lines(w / "metrics.jsonl"))] for w in (workdir, whole)]
    assert metrics[0] == metrics[1]
    results = [timeless(json.loads((w / "result.json").read_text())) for w in (workdir, whole)]
    assert results[0] == results[1]
    for name in ("model.safetensors", "config.json"):
        written = [(w / "backbone" / name).read_bytes() for w in (workdir, whole)]
        assert written[0] == written[1], name
    assert not [path for path in workdir.rglob("*") if path.name.endswith(".partial")]


def assert_not_ended(workdir: Path) -> None:
    """Checks that nothing there looks like a result."""
    assert not (workdir / "result.json").exists() and not (workdir / "backbone").exists()


@pytest.mark.long
def test_sigkill_then_sigterm_then_the_same_end(tmp_path_factory, tmp_path, capsys):
    """Span corruption by Adafactor."""
    whole, workdir = adapted(tmp_path_factory, CASE), tmp_path / "run"
    words = words_of(tmp_path_factory, CASE, workdir)
    kill(words, tmp_path / "logs", "saved", KILLED)
    assert_not_ended(workdir)
    code, out, err = stop(words, STOPPED, capsys)
    assert code == 0 and out == "" and f"{STEPS} steps, resumed at step {KILLED}" in err
    assert f"stopped by SIGTERM at step {STOPPED}; saved" in err
    assert_not_ended(workdir)
    out, err = succeed(capsys, *words)
    assert f"{STEPS} steps, resumed at step {STOPPED}" in err
    assert json.loads(out) == json.loads((workdir / "result.json").read_text())
    assert_same_end(workdir, whole)


@pytest.mark.long
def test_a_finished_run_is_not_adapted_again(tmp_path_factory, capsys, monkeypatch):
    def forbid(*_args, **_kwargs):
        raise AssertionError("adapted again")

    workdir = adapted(tmp_path_factory, "mlm-bert")
    times = lambda: {
        p: p.stat().st_mtime_ns for p in workdir.rglob("*") if p.is_file() and p.name != "lock"
    }
    before = times()
    monkeypatch.setattr("jaxprompt.training.steps.make_train_step", forbid)
    out, err = succeed(capsys, *words_of(tmp_path_factory, "mlm-bert", workdir))
    assert "already adapted, nothing to do" in err and str(workdir) in err
    assert json.loads(out) == json.loads((workdir / "result.json").read_text())
    assert times() == before
