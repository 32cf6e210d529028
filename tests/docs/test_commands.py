"""The commands of README and the guides run as they stand, but for sizes, on tiny models."""

import csv
import gzip
import itertools
import json
import shlex
import shutil
from pathlib import Path

import jax
import pytest
from test_guides import PAGES, commands
from test_token_heads import asked, tagged
from tiny_adapt import make_corpus
from tiny_run import flags, make_backbone, read_lines, sentences, write_rows

from jaxprompt.__main__ import main
from jaxprompt.assembly.load_config import load_config
from jaxprompt.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

GUIDES = {page.stem: commands(page) for page in PAGES if commands(page)}

# How a command begins, and why it is not run.
SKIPPED = {
    "plan --config=configs/ppt/t5_xxl.py '--devices=8x v5e' --compiler=tpu": (
        "needs libtpu; tests/accelerators asks the vendors' compilers"
    ),
    "plan --config=configs/ppt/t5_base.py '--devices=1x h100' --compiler=cuda": (
        "needs NVIDIA's compiler; tests/accelerators asks the vendors' compilers"
    ),
    "plan --config=configs/ppt/t5_xl.py '--devices=8x A100-40' --limit=16 --compiler=cuda": (
        "needs NVIDIA's compiler; tests/accelerators asks the vendors' compilers"
    ),
    "train --config=configs/ppt/t5_xxl.py:boolq,pt --workdir=/shared/boolq --coordinator=": (
        "four hosts and an address; tests/cli/test_train_hosts.py trains in several processes"
    ),
}


def said(page, *parts):
    """Gives the first command of a page that has these words."""
    return next(words for words in GUIDES[page] if set(parts) <= set(words))


# What a page takes for granted.
BEFORE = {
    "serving": [
        said("quickstart", "train", "--workdir=runs/tickets"),
        said("methods", "train", "--workdir=runs/soft"),
        ["export", "--workdir=runs/soft", "--peft=adapters/theirs"],
        said("heads", "train", "--workdir=runs/titles"),
        ["export", "--workdir=runs/titles", "--output=prompts/titles"],
        ["train", "--config=configs/ppt/t5_small.py:boolq,pt", "--workdir=runs/boolq"],
        ["export", "--workdir=runs/boolq", "--output=prompts/boolq"],
    ],
    "ppt": [said("backbones", "adapt", "--workdir=runs/mlm")],
}

POSITIONS = 64  # of the tiny models; a RoBERTa counts two more
SHORT = {
    "train.total_epochs": 0, "train.total_steps": 2, "train.total_examples": 0,
    "train.eval_epochs": 0, "train.eval_steps": 1, "train.save_steps": 0,
    "train.tracker": "none", "train.plot": False, "mesh.data": 1,
    "data.batch": 4, "data.eval_batch": 8, "generate.max_new": 4,
    "corpus.processes": 1, "corpus.held_out": 0.2, "corpus.dev_rows": 16,
}  # fmt: skip


def is_skipped(words):
    return any(shlex.join(words).startswith(start) for start in SKIPPED)


def test_what_is_skipped_stands_in_a_guide():
    lines = [shlex.join(words) for words in itertools.chain(*GUIDES.values())]
    assert [s for s in SKIPPED if not any(line.startswith(s) for line in lines)] == []


# -- the reader's files ---------------------------------------------------------------------------


def draw(seed, size, *fields, **classes):
    """Draws rows of texts, and of a column `label=(...)` of classes that take turns."""
    texts = iter(sentences(seed, size * len(fields)))
    return [
        {field: next(texts)["text"] for field in fields}
        | {label: names[number % len(names)] for label, names in classes.items()}
        for number in range(size)
    ]


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


def write_splits(folder, make):
    folder.mkdir(parents=True)
    for seed, (split, size) in enumerate({"train": 66, "dev": 12, "test": 12}.items()):
        write_rows(folder / f"{split}.jsonl", make(seed, size))


def renamed(seed, size):
    return [{"tokens": row["tokens"], "ner_tags": row["tags"]} for row in tagged(seed, size)]


@pytest.fixture(scope="session")
def backbones(tmp_path_factory):
    """Folders of tiny models, by family."""
    root = tmp_path_factory.mktemp("backbones")
    return {family: make_backbone(root / family, family) for family in ("bert", "roberta", "t5")}


@pytest.fixture(scope="session")
def files(backbones, tmp_path_factory):
    """A folder with all that the commands name: data sets, texts, models. Copy it."""
    root = tmp_path_factory.mktemp("reader")
    teams = {"team": ("billing", "login", "shipping")}
    write_csv(root / "tickets.csv", draw(0, 42, "message", **teams))
    write_csv(root / "quiz.csv", draw(0, 42, "question", "a", "b", "c", answer=("A", "B", "C")))
    for name in ("new", "messages"):
        write_csv(root / f"{name}.csv", draw(1, 5, "message"))
    write_rows(root / "titles.jsonl", draw(0, 24, "article", "title"))
    for name in ("new", "articles"):
        write_rows(root / f"{name}.jsonl", draw(1, 5, "article"))
    write_rows(root / "questions.jsonl", draw(1, 5, "question", "context", "passage"))
    data_sets = {
        "sst2": lambda *at: draw(*at, "sentence", label=(0, 1)),
        "sst5": lambda *at: draw(*at, "text", label=range(5)),
        "rte": lambda *at: draw(*at, "premise", "hypothesis", label=(0, 1)),
        "boolq": lambda *at: draw(*at, "question", "passage", label=(0, 1)),
        "ner": renamed,
        "squad": asked,
        "DATA/sst2": lambda *at: draw(*at, "sentence", label=(0, 1)),
        "DATA/trec": lambda *at: draw(*at, "text", coarse_label=range(6)),
    }
    for name, make in data_sets.items():
        write_splits(root / name, make)
    rows = {"seed": 13, "train": list(range(12)), "dev": list(range(12, 24))}
    with gzip.open(root / "DATA/trec/kshot_16.jsonl.gz", "wt") as file:
        file.write(json.dumps(rows) + "\n")
    for name in ("books", "texts"):
        make_corpus(root / name)
    (root / "t5").mkdir()
    shutil.copy(backbones["t5"] / "config.json", root / "t5")
    (root / "MLM").symlink_to(backbones["bert"])
    return root


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """A folder where compiled programs are kept: many commands here are of the same program."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    folder = tmp_path_factory.mktemp("compiled")
    for name, value in zip(names, (str(folder), 0.2), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


# -- commands -------------------------------------------------------------------------------------


def shrink(words, backbones):
    """Makes a command's run small: short, on a tiny model of the family that it names."""
    given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    if "config" not in given or words[0] == "plan":
        return words
    own = [(n.removeprefix("config."), v) for n, v in given.items() if n.startswith("config.")]
    c = load_config(given["config"], own)
    fields = dict(SHORT)
    path = c.backbone.path.lower()
    if path and not Path(c.backbone.path).exists():
        family = next((name for name in ("roberta", "t5") if name in path), "bert")
        fields["backbone.path"] = backbones[family]
    length = c.prompt.get("length", 0)
    if length > 20:
        fields["prompt.length"] = length = 8
    fields["data.max_len"] = POSITIONS - (length if c.prompt.name == "prefix" else 0)
    fields["data.multiple"] = fields["data.max_len"]
    if c.data.protocol == "holdout":
        fields["data.size"] = 12
    if not c.data.source and Path(c.task.name).is_dir():
        fields["data.source"] = c.task.name
    if "stride" in c.head:
        fields["head.stride"] = 8
    for name in ("seeds", "lr"):
        if len(c.runs[name]) > 2:
            fields[f"runs.{name}"] = tuple(c.runs[name])[:2]
    kept = [word for word in words if word.partition("=")[0] not in map("--config.{}".format, fields)]
    return [*kept, *flags(fields)]


@pytest.mark.parametrize("page", GUIDES)
def test_commands_run(page, files, backbones, tmp_path, monkeypatch, capsys):
    shutil.copytree(files, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    for words in [*BEFORE.get(page, []), *GUIDES[page]]:
        if is_skipped(words):
            continue
        words = shrink(words, backbones)
        import time
        t=time.process_time(); w=time.time()
        code = main(words)
        out, err = capsys.readouterr()
        with capsys.disabled():
            print(code, f"{time.process_time()-t:.1f} {time.time()-w:.1f}", shlex.join(words)[:150], out[-300:], err[-300:] if code else "")
        #assert code == 0, err
