"""Hostile config fields, cards and tokenizers end in success, or in one line and exit code 2."""

import json
import shutil

import numpy as np
import pytest
from fuzz import SEED, TEXTS, judge, leaves, mutated, sample, survive, write
from spoil import BASE
from tiny_run import make_backbone, make_config

from jaxprompt.__main__ import commands
from jaxprompt.build.check import check_config
from jaxprompt.build.examples import read_examples
from jaxprompt.build.optimizer import make_milestones
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import encode_splits, open_checked_backbone, scorer_from_config
from jaxprompt.config.load import load_config
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer

COUNTS = {"read": 150, "mutated": 150, "tokenizer": 80, "flags": 600}
FLAGS = """config config. config.x workdir output npy peft prompt input text backbone dtype batch
mesh generate force split devices limit compiler format family size cased table run coordinator
processes process cluster timeout debug""".split()


@pytest.fixture
def rng():
    """Draws the same in every run."""
    return np.random.default_rng(SEED)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Looks nothing up at the hub."""
    for name in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", True)


def read(path, field: str, text: str) -> None:
    """Checks a config, opens its backbone and reads its data."""
    config = load_config(str(path), [(field, text)])
    check_config(config)
    make_milestones(config.train, 7, config.data.batch)
    placement = build_placement(config)
    backbone = open_checked_backbone(config, placement)
    examples = read_examples(config)
    encode_splits(scorer_from_config(config, backbone, examples, placement), examples)


def test_fields_that_data_and_backbone_are_read_by(backbone, data, tmp_path, rng, monkeypatch):
    config = make_config(backbone, data, "prefix").to_json()
    path = write(tmp_path / "prefix.json", config)
    blocks = ("data", "task", "backbone", "head", "prompt")
    names = [".".join(way) for way in leaves(json.loads(config)) if way[0] in blocks]
    for name, text in sample(rng, names, TEXTS, count=COUNTS["read"]):
        survive(monkeypatch, (name, text), read, path, name, text)


def test_every_flag(tmp_path, rng, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ways = [(command, flag) for command in commands() for flag in ("", *FLAGS)]
    for (command, flag), text in sample(rng, ways, TEXTS, count=COUNTS["flags"]):
        argv = [command, f"--config={BASE}", "--workdir=absent", f"--{flag}={text}"]
        judge(argv, argv[:1] + argv[3:] if command == "predict" else argv)


# -- tokenizers -----------------------------------------------------------------------------------


def use_tokenizer(folder, style: str) -> None:
    """Loads a tokenizer and does with it what encoding does."""
    tokenizer = load_tokenizer(folder)
    read_specials(tokenizer, style, eos=True, sentinel="<extra_id_{}>", num_masks=1)
    encode_texts(tokenizer, ["a cat", "[MASK] é 不", ""])


STYLES = {"bert": "masked", "t5": "seq2seq", "gpt2": "causal"}


@pytest.mark.parametrize("family, style", STYLES.items())
def test_a_damaged_tokenizer(tmp_path, rng, monkeypatch, family, style):
    whole = make_backbone(tmp_path / "whole", family)
    assert survive(monkeypatch, family, use_tokenizer, whole, style) == 0
    names = sorted(path.name for path in whole.iterdir() if path.suffix in (".json", ".txt"))
    for i, (name,) in enumerate(sample(rng, names, count=COUNTS["tokenizer"])):
        folder = shutil.copytree(whole, tmp_path / str(i))
        write(folder / name, data := mutated((folder / name).read_bytes(), rng))
        survive(monkeypatch, (name, data), use_tokenizer, folder, style)
        shutil.rmtree(folder)
