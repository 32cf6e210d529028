"""Runs on a DeBERTa whose checkpoint has the table of its enhanced mask decoder."""

import numpy as np
import pytest
from test_bank import close
from tiny_adapt import adapt, change_tensors
from tiny_run import (
    TOPICS,
    jaxprompt,
    make_backbone,
    make_config,
    make_data,
    train_and_export,
)

import jaxprompt as jp
from jaxprompt.convert.weights import open_weights

pytestmark = pytest.mark.long

POSITIONS = "deberta.embeddings.position_embeddings.weight"
WORDS = {"words": tuple(TOPICS), "template": "[soft] {text} : [mask]"}


def draw(named):
    """Adds a table of as many positions as the tests' encoders have."""
    width = named["deberta.encoder.rel_embeddings.weight"].shape[1]
    table = np.random.default_rng(0).normal(size=(66, width))
    return named | {POSITIONS: np.float32(table)}


@pytest.fixture(scope="module")
def decoding(tmp_path_factory):
    folder = make_backbone(tmp_path_factory.mktemp("decoder") / "deberta", "deberta_v2")
    change_tensors(folder / "model.safetensors", draw)
    return folder


def test_heads_of_both_kinds_share_a_bank(decoding, rows, small):
    """What reads words reads the decoder's states, a linear head those of the last layer."""
    backbone = jp.load_backbone(str(decoding))
    cases = {
        "words": (jp.soft(2), {"head": jp.verbalizer()} | WORDS),
        "classes": (jp.soft(2), {"head": jp.linear()}),
        "deep": (jp.prefix(3), {"head": jp.verbalizer()} | WORDS | {"template": "{text} [mask]"}),
    }
    prompts = {
        name: jp.train(backbone, *rows, method=method, **small | fields).prompt
        for name, (method, fields) in cases.items()
    }
    mixed = [{"task": name, **row} for row in rows[1][:6] for name in prompts]
    bank = jp.attach(backbone, prompts, by="task", batch=16)
    predictions = jp.predict(bank, mixed)
    for number, (name, prompt) in enumerate(prompts.items()):
        model = jp.attach(backbone, prompt)
        assert close(predictions[number :: len(prompts)], jp.predict(model, rows[1][:6])), name
        assert model.scorer.model.backbone.cfg.decodes == (name != "classes")


def test_dart_tunes_it_and_what_is_exported_holds_it(decoding, tmp_path, capsys):
    data = make_data(tmp_path / "data")
    config = make_config(
        decoding, data, "dart", task__template="{text} about [soft] [mask]", prompt__length=1,
        prompt__text="it", prompt__fluency=0.5, task__labels="beast,food,tool",
        train__total_steps=2, data__max_len=32,
    )  # fmt: skip
    _, workdir, err = train_and_export(capsys, tmp_path, config)
    assert "heads in the checkpoint: mlm, mask_decoder" in err
    rows, tuned = data / "test.jsonl", tmp_path / "tuned"
    before = jaxprompt(capsys, "predict", f"--workdir={workdir}", f"--input={rows}")[1]
    code, _, err = jaxprompt(capsys, "export", f"--workdir={workdir}", f"--tuned={tuned}")
    assert code == 0, err
    with open_weights(decoding) as old, open_weights(tuned) as new:
        assert not np.array_equal(old.read(POSITIONS), new.read(POSITIONS))
    words = [f"--prompt={workdir / 'export'}", f"--backbone={tuned}", f"--input={rows}"]
    after = jaxprompt(capsys, "predict", *words)[1]
    assert after == before and len(after.splitlines()) == 24


def test_adapting_trains_the_table(decoding, tmp_path, tmp_path_factory):
    workdir = adapt(tmp_path_factory, "mlm-deberta_v2", tmp_path / "run", backbone__path=decoding)
    with open_weights(decoding) as old, open_weights(workdir / "backbone") as new:
        before, after = (x.read(POSITIONS) for x in (old, new))
    assert before.shape == after.shape and not np.array_equal(before, after)
