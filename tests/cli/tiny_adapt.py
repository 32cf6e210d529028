"""A tiny corpus, backbones of every family, and runs of `adapt` that end in seconds."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from spoil import edit
from tiny_run import ROOT, flags, make_backbone, read_lines, sentences, write_rows

from jaxprompt.__main__ import main
from jaxprompt.corpus import TextSettings, index_corpus, split_held_out
from jaxprompt.corpus.denoise import clm, mlm, prefix_lm, span_corruption
from jaxprompt.corpus.denoise.batches import DenoisingSamples, EvalBatches
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.types import Batch

LENGTH, BATCH, STEPS, SCORED = 24, 16, 12, 4  # dev is scored every SCORED steps
HELD_OUT = 0.2


class Case(NamedTuple):
    """An objective on a kind of backbone, and what its run has of its own."""

    objective: str
    kind: str  # of `make_kind`
    fields: dict[str, object] = {}


ADAFACTOR = {"optim.name": "adafactor", "optim.scaled": True, "optim.lr": 0.1}
CASES = {
    "mlm-bert": Case("mlm", "bert", {"optim.accumulate": 2}),
    "mlm-roberta": Case("mlm", "roberta-trunk", {"objective.whole_words": True}),
    "mlm-albert": Case("mlm", "albert", {"objective.whole_words": True}),
    "mlm-deberta_v2": Case("mlm", "deberta_v2", {"objective.packed": True}),
    "mlm-modernbert": Case("mlm", "modernbert"),
    "rtd-electra": Case("rtd", "electra", {"objective.generator": 0.5}),
    "rtd-bert": Case("rtd", "bert"),
    "clm-gpt2": Case("clm", "gpt2"),
    "clm-llama": Case("clm", "llama"),
    "prefix_lm-t5": Case("prefix_lm", "t5-v1.1", {"optim.name": "adamw", "optim.lr": 1e-2}),
    "span_corruption-t5": Case("span_corruption", "t5-init", ADAFACTOR | {"optim.accumulate": 2}),
}


def make_kind(folder: Path, kind: str) -> Path:
    """Writes a backbone: a family's, or one of those that the tests tell apart.

    roberta-trunk has no head, t5-v1.1 an output table of its own, and of t5-init, shaped like
    v1.0, config and tokenizer alone are there, as of bert-init.
    """
    make_backbone(folder, kind.partition("-")[0])
    weights = folder / "model.safetensors"
    if kind.endswith("init"):
        weights.unlink()
    if kind == "t5-init":
        form = dict(feed_forward_proj="relu", dense_act_fn="relu", is_gated_act=False)
        edit(folder / "config.json", tie_word_embeddings=True, **form)
    if kind == "roberta-trunk":
        change_tensors(
            weights, lambda named: {n: x for n, x in named.items() if "lm_head" not in n}
        )
    if kind == "t5-v1.1":  # transformers itself ties every T5
        edit(folder / "config.json", tie_word_embeddings=False)
        draw = lambda table: 0.1 * np.random.default_rng(0).normal(size=table.shape)
        add = lambda named: named | {"lm_head.weight": np.float32(draw(named["shared.weight"]))}
        change_tensors(weights, add)
    return folder


def change_tensors(path: Path, change) -> None:
    """Rewrites a safetensors file."""
    from safetensors.numpy import load_file, save_file

    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def make_corpus(folder: Path, documents: int = 60) -> Path:
    """Writes documents of four short lines."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row["text"] for row in sentences(0, 4 * documents)]
    texts = ["\n".join(rows[i : i + 4]) for i in range(0, len(rows), 4)]
    write_rows(folder / "corpus.jsonl", [{"text": text} for text in texts])
    return folder


def made(tmp_path_factory, kind: str) -> Path:
    """Makes a backbone, or the "corpus", once a session. -> its folder"""
    folder = tmp_path_factory.getbasetemp() / "adapt" / kind
    if not folder.exists():
        make_corpus(folder) if kind == "corpus" else make_kind(folder, kind)
    return folder


def tiny_fields(backbone: Path, corpus: Path) -> dict[str, object]:
    """Gives the fields of a small run by dotted name; a config.json is one to begin from."""
    of_backbone = {"backbone.path": backbone}
    if not (backbone / "model.safetensors").exists():
        of_backbone = {"backbone.init": backbone / "config.json"}
    return of_backbone | {
        "corpus.path": corpus, "corpus.processes": 1, "corpus.held_out": HELD_OUT,
        "objective.examples": 0, "data.max_len": LENGTH, "data.batch": BATCH,
        "data.eval_batch": BATCH, "optim.lr": 1e-2, "optim.schedule": "constant",
        "train.total_steps": STEPS, "train.eval_steps": SCORED, "train.save_steps": 0,
        "train.log_steps": 1, "train.tracker": "none", "train.plot": False, "mesh.data": 1,
    }  # fmt: skip


def words_of(tmp_path_factory, name: str, workdir: Path, **changes: object) -> list[str]:
    """Writes the command of a case; a field of a block has two underscores: optim__lr=1e-2."""
    case = CASES[name]
    fields = tiny_fields(made(tmp_path_factory, case.kind), made(tmp_path_factory, "corpus"))
    fields |= case.fields | {key.replace("__", "."): value for key, value in changes.items()}
    config = ROOT / f"configs/adapt/{case.objective}.py"
    return ["adapt", f"--config={config}", f"--workdir={workdir}", *flags(fields)]


def adapt(tmp_path_factory, name: str, workdir: Path, **changes: object) -> Path:
    """Runs a case, some fields changed, to its end. -> workdir"""
    assert main(words_of(tmp_path_factory, name, workdir, **changes)) == 0
    return workdir


def adapted(tmp_path_factory, name: str) -> Path:
    """Runs a case once a session. -> its workdir, which nobody may change"""
    workdir = tmp_path_factory.getbasetemp() / "adapted" / name
    if not (workdir / "result.json").exists():
        adapt(tmp_path_factory, name, workdir)
    return workdir


def scores(workdir: Path) -> list[dict[str, float]]:
    """Lists what each look at the held-out documents found."""
    return [line["dev"] for line in read_lines(workdir / "metrics.jsonl") if "dev" in line]


def held_out(workdir: Path) -> Iterator[Batch]:
    """Makes the held-out rows of a run from its saved tokenizer, with the functions of the data."""
    config = json.loads((workdir / "config.json").read_text())
    tokenizer = load_tokenizer(workdir / "backbone")
    make, more = {
        "mlm": (mlm.make, {"whole_words": config["objective"].get("whole_words")}),
        "rtd": (mlm.make, {"masked": 1.0, "random": 0.0}),
        "clm": (clm.make, {}),
        "prefix_lm": (prefix_lm.make, {"start": 0}),
        "span_corruption": (span_corruption.make, {"start": 0}),
    }[config["objective"]["name"]]
    messages = []
    corpus = index_corpus(
        config["corpus"]["path"], tokenizer, workdir / "corpus", TextSettings(), processes=1,
        report=messages.append,
    )  # fmt: skip
    assert not messages, "the saved tokenizer is another: the text was indexed anew"
    _, share = split_held_out(len(corpus), HELD_OUT, 0)
    assert len(share) == 12
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = DenoisingSamples(corpus, share, make(tokenizer, LENGTH, **more), packed=True, pad_id=pad)
    return iter(EvalBatches(rows, batch=BATCH, seed=0, limit=512))


def without_result(workdir: Path, copy: Path) -> Path:
    """Copies a run as if it had not ended yet."""
    shutil.copytree(workdir, copy)
    (copy / "result.json").unlink()
    return copy
