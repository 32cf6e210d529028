"""A tiny corpus, labels of it, and runs of `pretrain` that end in seconds."""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tiny_run
from tiny_adapt import change_tensors
from tiny_run import ROOT, TOPICS, flags, jaxprompt, make_backbone, sentences, write_rows

from jaxprompt.__main__ import main
from jaxprompt.corpus import index_corpus
from jaxprompt.corpus.ppt import AnnotationWriter
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.training.log import RunLog

BATCH, STEPS, SCORED = 16, 12, 4  # held-out documents are scored every SCORED steps
SLOTS, UNITS, DOCUMENTS = 4, 8, 40
WORDS = "no maybe yes terrible great the correct one is".split()
MEANT = ("terrible", "maybe", "great")  # the words that share a direction with a topic's
STARS = tuple(f"{number} stars" for number in range(1, 6))


class Case(NamedTuple):
    """A task on a family, and what its run has of its own."""

    task: str
    family: str
    kind: str  # the config's argument
    fields: dict[str, object]


ALONE = {"head.span": "label", "head.scores": "restricted"}  # the label words, and no others
CASES = {
    "cls-bert": Case("cls", "bert", "masked", ALONE | {"data.max_len": 24}),
    "cls-t5": Case("cls", "t5", "t5-deep", ALONE | {"data.max_len": 24, "prompt.cross": 2}),
    "cls-gpt2": Case("cls", "gpt2", "causal", {"data.max_len": 40, "head.span": "label"}),
    "cls-gpt2-deep": Case("cls", "gpt2", "causal-deep", {"data.max_len": 40, "head.span": "label"}),
    "cls-llama": Case("cls", "llama", "causal", {"data.max_len": 40, "head.span": "label"}),
    "nsp-glm": Case("nsp", "glm", "infilling", {"data.max_len": 48}),
    "nsp-t5": Case("nsp", "t5", "t5", {"data.max_len": 48, "prompt.decoder": 1}),
    "nss-bert": Case("nss", "bert", "masked", {"data.max_len": 64}),
    "unified-t5": Case("unified", "t5", "t5", {"data.max_len": 100, "ppt.max_options": 4}),
}


def make_kind(folder: Path, family: str) -> Path:
    """Writes a family's backbone that knows the words of the patterns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_run, "VOCAB", list(dict.fromkeys([*tiny_run.VOCAB, *WORDS])))
        patch.setattr(tiny_run, "WORDS", [*tiny_run.WORDS, *WORDS])
        patch.setattr(tiny_run, "TOPICS", dict(zip(MEANT, TOPICS.values(), strict=True)))
        make_backbone(folder, family)
    if family == "t5":
        change_tensors(folder / "model.safetensors", pass_on)
    return folder


def pass_on(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Makes a T5's attention pass on what stands in the words, as pre-training would."""
    ends = ("Attention.v.weight", "Attention.o.weight")
    eye = lambda x: 2 * np.eye(*x.shape, dtype=x.dtype)
    return named | {name: x + eye(x) for name, x in named.items() if name.endswith(ends)}


def corpus_texts() -> list[str]:
    """Makes documents of short lines; what tells a line's topic stands in it."""
    rows = [row["text"] for row in sentences(0, UNITS * DOCUMENTS)]
    return ["\n".join(rows[i : i + UNITS]) for i in range(0, len(rows), UNITS)]


def make_corpus(folder: Path) -> Path:
    """Writes the documents."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "corpus.jsonl", [{"text": text} for text in corpus_texts()])
    return folder


def made(tmp_path_factory, kind: str) -> Path:
    """Makes a family's backbone, the "corpus" or its "labels", once a session. -> the folder"""
    folder = tmp_path_factory.getbasetemp() / "pretrain" / kind
    if not folder.exists():
        if kind == "corpus":
            make_corpus(folder)
        elif kind == "labels":
            annotate(tmp_path_factory, folder)
        else:
            make_kind(folder, kind)
    return folder


def annotate(tmp_path_factory, folder: Path) -> Path:
    """Labels the corpus by its topics, which become the worst, the middle and the best class."""
    tokenizer = load_tokenizer(made(tmp_path_factory, "bert"))
    source = str(made(tmp_path_factory, "corpus"))
    corpus = index_corpus(source, tokenizer, folder.with_name(f"{folder.name}-store"), processes=1)
    topics = {word: number for number, words in enumerate(TOPICS.values()) for word in words}
    labels = []
    for number in range(corpus.num_units):
        text = tokenizer.decode(corpus.unit(number)).split()
        (topic,) = {topics[word] for word in text if word in topics}
        labels.append(topic * 2)
    rest = 0.01 / (len(STARS) - 1)
    table = np.where(np.arange(len(STARS)) == np.array(labels)[:, None], 0.99, rest)
    writer = AnnotationWriter(folder, corpus, STARS, "topics")
    writer.append(table)
    writer.seal()
    return folder


def fields_of(tmp_path_factory, name: str) -> dict[str, object]:
    """Gives the fields of a case's run by dotted name."""
    case = CASES[name]
    annotations = (
        {"ppt.annotations": made(tmp_path_factory, "labels")} if case.task == "cls" else {}
    )
    return {
        "backbone.path": made(tmp_path_factory, case.family),
        "corpus.path": made(tmp_path_factory, "corpus"), "corpus.processes": 1,
        "corpus.held_out": 0.2, "prompt.length": SLOTS, "data.batch": BATCH,
        "data.eval_batch": BATCH, "backbone.dtype": "float32", "train.total_steps": STEPS,
        "train.eval_steps": SCORED, "train.save_steps": 0, "train.log_steps": 1,
        "train.tracker": "none", "train.plot": False, "mesh.data": 1, **annotations, **case.fields,
    }  # fmt: skip


def words_of(tmp_path_factory, name: str, workdir: Path, **changes: object) -> list[str]:
    """Writes the command of a case; a field of a block has two underscores: optim__lr=1e-2."""
    case = CASES[name]
    fields = fields_of(tmp_path_factory, name)
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    config = f"{ROOT / 'configs/ppt'}/{case.task}.py:{case.kind}"
    return ["pretrain", f"--config={config}", f"--workdir={workdir}", *flags(fields)]


def pretrain(tmp_path_factory, name: str, workdir: Path, **changes: object) -> Path:
    """Runs a case, some fields changed, to its end. -> workdir"""
    assert main(words_of(tmp_path_factory, name, workdir, **changes)) == 0
    return workdir


def pretrained(tmp_path_factory, name: str) -> Path:
    """Runs a case once a session and exports it. -> its workdir, which nobody may change"""
    workdir = tmp_path_factory.getbasetemp() / "pretrained" / name
    if not (workdir / "export").exists():
        pretrain(tmp_path_factory, name, workdir)
        place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
        assert main(["export", *place]) == 0
    return workdir


def kill(words: list[str], folder: Path, moment: str, step: int) -> None:
    """Runs a command in a process that ends itself by SIGKILL, as killed.py says."""
    from processes import Processes  # where this file is the script, it is out of reach

    here = Path(__file__).parent
    with Processes(folder, devices=8) as processes:
        processes.start([here / "killed.py", moment, step, *words])
        assert processes.wait() == [-signal.SIGKILL], processes.told()


def stop(words: list[str], step: int, capsys) -> tuple[int, str, str]:
    """Runs a command that gets SIGTERM after a step. -> exit code, standard output, error"""
    progress = RunLog.progress

    def progress_then_signal(self, at):
        progress(self, at)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "progress", progress_then_signal)
        return jaxprompt(capsys, *words)
