"""The package of tests/plugin, built and put on the path, adds a method, a head and a task."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spoil import BASE
from tiny_run import ROOT, TOPICS, flags, make_backbone, sentences, write_rows
from wheels import unpack_wheel

PLUGIN = ROOT / "tests" / "plugin"
FILES = ("pyproject.toml", "ticket_prompts.py", "ticket_tasks.py")
TEAMS = dict(zip(TOPICS, ("billing", "login", "shipping"), strict=True))
# Commands, each a list of words, in one process that imports JAX once.
RUN = """
import json, sys
from jaxprompt.__main__ import main
for words in json.loads(sys.argv[1]):
    print("===", words[0], flush=True)
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert not code, (words, code)
"""


def call(site: Path, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Runs Python with the unpacked wheel and this repository on its path."""
    path = os.pathsep.join(map(str, (site, ROOT)))
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The wheel, built without network and unpacked. -> folder"""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(PLUGIN / name, source)
    return unpack_wheel(source, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def outputs(site, tmp_path_factory):
    """What each command printed, and the folder of the run."""
    folder = tmp_path_factory.mktemp("tickets")
    make_backbone(folder / "backbone")
    for seed, name in enumerate(("train", "dev")):
        rows = [{"message": x["text"], "team": TEAMS[x["label"]]} for x in sentences(seed, 24)]
        write_rows(folder / f"{name}.jsonl", rows)
    fields = {
        "prompt.name": "low_rank", "prompt.length": 3, "head.name": "cosine",
        "task.name": "tickets", "backbone.path": folder / "backbone",
        "data.max_len": 24, "data.batch": 8, "mesh.data": 1,
        "data.files.train": folder / "train.jsonl", "data.files.dev": folder / "dev.jsonl",
        "train.total_steps": 2, "train.total_epochs": 0, "train.eval_steps": 2,
        "train.tracker": "none", "train.plot": False, "train.test": False,
    }  # fmt: skip
    run = f"--workdir={folder / 'run'}"
    commands = [
        ["methods"], ["methods", "low_rank"], ["heads"], ["tasks"], ["tasks", "tickets"],
        ["train", "--help=all"], ["train", f"--config={BASE}", run, *flags(fields)],
        ["export", run], ["predict", run, "--text=the cat"],
    ]  # fmt: skip
    done = call(site, "-c", RUN, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^=== \w+\n", done.stdout, flags=re.M)[1:]
    return [" ".join(words[:2]) for words in commands], parts, folder


def test_listings_and_help_show_what_the_package_adds(outputs):
    titles, parts, _ = outputs
    shown = dict(zip(titles, parts, strict=True))
    assert re.search(r"^low_rank +Soft tokens .*\(ticket-prompts 1\.0\)$", shown["methods"], re.M)
    assert "prompt.rank = 4" in shown["methods low_rank"]
    assert re.search(r"^cosine +Classes by .*\(ticket-prompts 1\.0\)$", shown["heads"], re.M)
    assert re.search(r"^tickets +3 classes .*\(ticket-prompts 1\.0\)$", shown["tasks"], re.M)
    assert "billing, login, shipping" in shown["tasks tickets"]
    assert "prompt, with prompt.name=low_rank" in shown["train --help=all"]
    assert "head.scale = 10.0" in shown["train --help=all"]


def test_it_trains_exports_and_predicts(outputs):
    _, parts, folder = outputs
    (answer,) = map(json.loads, parts[-1].splitlines())
    assert set(answer["scores"]) == set(TEAMS.values())
    metadata = json.loads((folder / "run/export/prompt.json").read_text())
    assert metadata["plugins"] == {"ticket-prompts": "1.0"}
    assert metadata["method"] == "low_rank" and metadata["hyper"]["rank"] == 4
    assert metadata["head"] == {"name": "cosine", "scale": 10.0}


def test_an_export_names_the_package_that_it_needs(outputs, refused):
    """Here, where the package is not on the path."""
    export = outputs[-1] / "run/export"
    message = refused("predict", f"--prompt={export}", "--text=the cat")
    assert str(export) in message
    assert "ticket-prompts 1.0" in message and "pip install ticket-prompts" in message


@pytest.mark.long
def test_its_method_passes_the_contract(site):
    words = ("-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", "low_rank-bert")
    done = call(site, *words, "tests/test_contract.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^8 passed", done.stdout, re.M), done.stdout


def test_the_guide_shows_the_package_and_a_backbone():
    guide = (ROOT / "docs/extending.md").read_text("utf-8")
    files = [PLUGIN / name for name in FILES]
    files += [ROOT / "jaxprompt" / f / "distilbert.py" for f in ("backbones", "convert/names")]
    for path in files:
        assert path.read_text("utf-8") in guide, path


# -- the method and the head that docs/extending.md writes out -------------------------------------

FILE = re.compile(r"to be saved as\s+`(jaxprompt/[\w/]+\.py)`:\n\n```python\n(.*?)```", re.S)


@pytest.mark.long
def test_what_the_page_writes_trains_and_predicts(tmp_path):
    skip = shutil.ignore_patterns("__pycache__")
    for package in ("jaxprompt", "configs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=skip)
    written = FILE.findall((ROOT / "docs/extending.md").read_text("utf-8"))
    assert [name for name, _ in written] == [
        "jaxprompt/prompts/residual.py",
        "jaxprompt/heads/mlp.py",
    ]
    for name, text in written:
        (tmp_path / name).write_text(text)

    def call(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "jaxprompt", *arguments], cwd=tmp_path, text=True, check=True,
            capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        ).stdout  # fmt: skip

    make_backbone(tmp_path / "backbone")
    train, dev = (write_rows(tmp_path / f"{n}.jsonl", sentences(n, 24)) for n in (0, 1))
    call(
        "train", "--config=base:soft", "--workdir=run", "--config.prompt.name=residual",
        "--config.prompt.length=3", "--config.head.name=mlp", "--config.head.width=8",
        "--config.backbone.path=backbone", "--config.task.name=custom", "--config.task.fields=text",
        f"--config.data.files.train={train}", f"--config.data.files.dev={dev}",
        "--config.data.max_len=24", "--config.train.total_steps=2", "--config.train.total_epochs=0",
        "--config.train.eval_steps=2", "--config.train.tracker=none", "--config.train.test=False",
    )  # fmt: skip
    call("export", "--workdir=run")
    document = json.loads(call("predict", "--prompt=run/export", "--text=the cat"))
    assert document["prediction"] in TOPICS
