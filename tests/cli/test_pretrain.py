"""`pretrain`: from a folder of text to a prompt that a tuned run starts from."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from processes import Processes
from safetensors.numpy import load_file
from tiny_adapt import losses, scores
from tiny_pretrain import (
    CASES,
    MEANT,
    SCORED,
    SLOTS,
    STEPS,
    corpus_texts,
    kill,
    made,
    pretrain,
    pretrained,
    stop,
    words_of,
)
from tiny_run import TOPICS, WIDTH, jaxprompt, make_config, read_lines, timeless, write_rows

from jaxprompt.corpus import split_held_out
from jaxprompt.runs.train import train_prompt
from jaxprompt.training.checkpoint_writer import ARRAY_OVERHEAD, STEP_OVERHEAD

KILLED, STOPPED = 8, 10  # SIGKILL once step 8 is saved, then SIGTERM


def result_of(workdir) -> dict:
    return json.loads((workdir / "result.json").read_text())


def card_of(workdir) -> dict:
    return json.loads((workdir / "export/prompt.json").read_text())


# -- what a run leaves ----------------------------------------------------------------------------


@pytest.mark.default_cases("nss-bert")
@pytest.mark.parametrize("name", CASES)
def test_it_learns_and_exports_the_prompt_of_the_best_look(name, tmp_path_factory):
    workdir, case = pretrained(tmp_path_factory, name), CASES[name]
    lines, dev = read_lines(workdir / "metrics.jsonl"), scores(workdir)
    assert len(losses(workdir)) == STEPS and len(dev) == STEPS // SCORED
    assert np.mean(losses(workdir)[-4:]) < 0.95 * np.mean(losses(workdir)[:2])
    assert all(line["lr"] > 0 for line in lines if "loss" in line)
    for line in lines[:3]:
        assert set(line["scores"]) == {"accuracy", "loss", "majority"}
        assert line["scores"]["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert line["time"]["tokens_per_second"] > 0 and line["time"]["tflops"] > 0
    assert all(math.isfinite(x) for measured in dev for x in measured.values())
    result, card = result_of(workdir), card_of(workdir)
    if name in ("cls-bert", "cls-t5"):
        assert result["held_out"]["accuracy"] > dev[0]["majority"] + 0.3

    best = min(range(len(dev)), key=lambda i: dev[i]["loss"])
    assert result["held_out"] == dev[best] and result["best_step"] == (best + 1) * SCORED
    assert result["task"] == case.task and result["steps"] == STEPS
    tokens = sum(len(text.split()) for text in corpus_texts())  # each word is one
    expected = {
        "task": case.task, "patterns": "en_end" if case.kind.startswith("causal") else "en",
        "documents": 40, "tokens": tokens, "steps": result["best_step"], "held_out": dev[best],
    }  # fmt: skip
    about = card["pretrained"]
    assert {part: about[part] for part in expected} == expected
    assert about["corpus"].endswith("/corpus")
    assert about.get("options") == {"nss": [6, 6], "unified": [2, 4]}.get(case.task)
    assert card["metrics"] == {"held_out": dev[best]}

    tensors = load_file(workdir / "export/prompt.safetensors")
    assert all(part.startswith("prompt/") for part in tensors)
    trained = sum(x.size for x in tensors.values())
    assert result["trained"] == trained
    if name == "nsp-t5":
        assert {part: x.shape for part, x in tensors.items()} == {
            "prompt/slots": (SLOTS, WIDTH), "prompt/decoder_slots": (1, WIDTH),
        }  # fmt: skip
    # Parameters and two moments of Adam; counters and rates are a few arrays more.
    for state in (workdir / "checkpoints").glob("*/state"):
        size = sum(file.stat().st_size for file in state.rglob("*") if file.is_file())
        assert 12 * trained <= size < STEP_OVERHEAD + 12 * trained + 30 * ARRAY_OVERHEAD
    backbone = made_of(workdir) / "model.safetensors"
    assert backbone.stat().st_size > 3 * 4 * trained


def made_of(workdir) -> Path:
    return Path(card_of(workdir)["backbone"]["id"])


@pytest.mark.long
def test_predict_scores_held_out_texts_alike(tmp_path_factory, tmp_path, capsys):
    """The prompt stands downstream where it stood: the same accuracy, from texts."""
    workdir = pretrained(tmp_path_factory, "cls-bert")
    _, held = split_held_out(40, 0.2, 0)
    documents = corpus_texts()
    texts = [t for i in held for t in documents[i].splitlines() if len(t.split()) >= 4]
    file = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    words = ["predict", f"--workdir={workdir}", f"--input={file}", f"--output={tmp_path / 'out'}"]
    code, _, err = jaxprompt(capsys, *words)
    assert code == 0, err
    answers = read_lines(tmp_path / "out")
    right = [line["prediction"] == label_of(line["text"]) for line in answers]
    assert np.mean(right) == pytest.approx(result_of(workdir)["held_out"]["accuracy"])
    losses = [-np.log(line["scores"][label_of(line["text"])]) for line in answers]
    assert np.mean(losses) == pytest.approx(result_of(workdir)["held_out"]["loss"], rel=1e-4)


def label_of(text: str) -> str:
    """Tells the word for the topic of a text."""
    (label,) = {
        word for word, own in zip(MEANT, TOPICS.values(), strict=True) if {*own} & {*text.split()}
    }
    return label


# -- cut off, and on other devices ----------------------------------------------------------------


def assert_same_end(workdir, whole) -> None:
    """Compares metrics, result and prompt."""
    lines = (read_lines(folder / "metrics.jsonl") for folder in (workdir, whole))
    found, expected = (list(map(timeless, own)) for own in lines)
    assert found == expected
    assert timeless(result_of(workdir)) == timeless(result_of(whole))
    found, expected = (w / "export/prompt.safetensors" for w in (workdir, whole))
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.long
def test_sigkill_then_sigterm_then_the_same_end(tmp_path_factory, tmp_path, capsys):
    """In the middle of an epoch, which has 16 steps."""
    whole, workdir = pretrained(tmp_path_factory, "nsp-t5"), tmp_path / "run"
    words = words_of(tmp_path_factory, "nsp-t5", workdir)
    kill(words, tmp_path / "logs", "saved", KILLED)
    code, out, err = stop(words, STOPPED, capsys)
    assert code == 0 and out == "" and f"{STEPS} steps of 16 x 48 tokens, resumed at step 8" in err
    assert not (workdir / "result.json").exists()
    code, out, err = jaxprompt(capsys, *words)
    assert code == 0 and f"resumed at step {STOPPED}" in err
    assert json.loads(out) == result_of(workdir)
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    assert_same_end(workdir, whole)


@pytest.mark.long
def test_two_processes_pretrain_as_one(tmp_path_factory, tmp_path):
    alone = pretrained(tmp_path_factory, "cls-bert")
    workdir = tmp_path / "run"
    changes = dict(mesh__data=2, train__total_steps=SCORED)
    words = words_of(tmp_path_factory, "cls-bert", workdir, **changes)
    with Processes(tmp_path / "logs", devices=1) as processes:
        processes.start_all(2, ["-m", "jaxprompt", *words])
        assert processes.wait() == [0, 0], processes.told()
        assert json.loads(processes.out(0)) == result_of(workdir) and processes.out(1) == ""
    np.testing.assert_allclose(losses(workdir), losses(alone)[:SCORED], rtol=1e-5)
    assert scores(workdir) == [pytest.approx(scores(alone)[0], rel=1e-5)]


def test_a_finished_run_is_not_pretrained_again(tmp_path_factory, capsys, monkeypatch):
    def forbid(*_args, **_kwargs):
        raise AssertionError("pre-trained again")

    workdir = pretrained(tmp_path_factory, "nss-bert")
    monkeypatch.setattr("jaxprompt.training.steps.make_train_step", forbid)
    code, out, err = jaxprompt(capsys, *words_of(tmp_path_factory, "nss-bert", workdir))
    assert code == 0 and "already pre-trained, nothing to do" in err
    assert json.loads(out) == result_of(workdir)


# -- a run that starts from it --------------------------------------------------------------------

METHODS = {
    "nsp-t5": ("soft", dict(length=SLOTS), {"prompt__decoder": 1}),
    "cls-t5": ("prefix", dict(length=SLOTS, dropout=0.0), {"prompt__cross": 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_train_starts_with_these_numbers(name, tmp_path_factory, tmp_path, data, capsys):
    """Soft tokens of a T5 were learned among embeddings divided by 100."""
    origin = pretrained(tmp_path_factory, name)
    method, arguments, fields = METHODS[name]
    c = make_config(
        made(tmp_path_factory, CASES[name].family), data, method, arguments=arguments,
        prompt__init=origin / "export", head__name="verbalizer", task__template="{text} [mask]",
        task__words="terrible,maybe,great", optim__lr=0, train__total_steps=1,
        data__max_len=32, **fields,
    )  # fmt: skip
    result = train_prompt(c, str(tmp_path / "run")).to_json()
    if CASES[name].task == "cls":  # the classes are known already
        assert result["test"]["accuracy"] > 0.6
    assert f"prompt initialised from {origin / 'export'}" in capsys.readouterr().err
    place = (f"--config={tmp_path / 'run/config.json'}", f"--workdir={tmp_path / 'run'}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    old, new = (load_file(w / "export/prompt.safetensors") for w in (origin, tmp_path / "run"))
    assert old.keys() == new.keys()
    for part, x in old.items():
        divided = part.endswith("slots") and name == "nsp-t5"
        np.testing.assert_array_equal(new[part], x * np.float32(100) if divided else x)
    card, first = card_of(tmp_path / "run"), card_of(origin)
    assert card["init"]["path"] == str(origin / "export")
    for part in ("pretrained", "sha256", "created", "method", "seed"):
        assert card["init"][part] == first[part]
    assert card["init"]["task"] == CASES[name].task and "pretrained" not in card


@pytest.mark.long
def test_pretraining_goes_on_from_an_export(tmp_path_factory, tmp_path):
    origin = pretrained(tmp_path_factory, "cls-bert")
    changes = dict(prompt__init=origin / "export", train__total_steps=1)
    workdir = pretrain(tmp_path_factory, "cls-bert", tmp_path / "run", **changes)
    assert losses(workdir)[0] < 0.5 * losses(origin)[0]
