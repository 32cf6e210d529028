"""`pretrain`: from a folder of text to a prompt that a tuned run starts from."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from processes import Processes
from safetensors.numpy import load_file
from spoil import BASE
from test_resume import arrays
from test_runs import results
from tiny_adapt import scores
from tiny_pretrain import (
    CASES,
    MEANT,
    SCORED,
    SLOTS,
    STEPS,
    corpus_texts,
    fields_of,
    kill,
    made,
    pretrain,
    pretrained,
    stop,
    words_of,
)
from tiny_run import (
    LAYERS,
    TOPICS,
    WIDTH,
    flags,
    jaxprompt,
    losses,
    make_config,
    read_lines,
    succeed,
    timeless,
    tiny_fields,
    write_rows,
)

from jaxprompt.corpus import split_held_out
from jaxprompt.runs.train import train_prompt

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
        assert 12 * trained <= size < 16384 + 12 * trained + 30 * 2048
    backbone = made_of(workdir) / "model.safetensors"
    assert backbone.stat().st_size > 3 * 4 * trained


def test_a_deep_prefix_of_a_causal_model(tmp_path_factory, tmp_path, capsys):
    changes = dict(train__total_steps=1, train__eval_steps=1)
    workdir = pretrain(tmp_path_factory, "cls-gpt2-deep", tmp_path / "run", **changes)
    assert np.isfinite(losses(workdir)).all() and math.isfinite(scores(workdir)[0]["loss"])
    succeed(capsys, "export", f"--workdir={workdir}")
    tensors = load_file(workdir / "export/prompt.safetensors")
    assert tensors.keys() == {"prompt/k", "prompt/v"} and len(tensors["prompt/k"]) == LAYERS
    assert SLOTS in tensors["prompt/k"].shape


def made_of(workdir) -> Path:
    return Path(card_of(workdir)["backbone"]["id"])


@pytest.mark.long
def test_predict_scores_held_out_texts_alike(tmp_path_factory, tmp_path, capsys):
    """The prompt stands downstream where it stood: the same accuracy, from texts."""
    workdir = pretrained(tmp_path_factory, "cls-bert")
    _, held_out = split_held_out(40, 0.2, 0)
    documents = corpus_texts()
    texts = [t for i in held_out for t in documents[i].splitlines() if len(t.split()) >= 4]
    file = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    words = ["predict", f"--workdir={workdir}", f"--input={file}", f"--output={tmp_path / 'out'}"]
    succeed(capsys, *words)
    answers = read_lines(tmp_path / "out")
    right = [line["prediction"] == label_of(line["text"]) for line in answers]
    assert np.mean(right) == pytest.approx(result_of(workdir)["held_out"]["accuracy"])
    losses = [-np.log(line["scores"][label_of(line["text"])]) for line in answers]
    assert np.mean(losses) == pytest.approx(result_of(workdir)["held_out"]["loss"], rel=1e-4)


def label_of(text: str) -> str:
    """Tells the word for the topic of a text."""
    (label,) = {
        word
        for word, topic in zip(MEANT, TOPICS.values(), strict=True)
        if {*topic} & {*text.split()}
    }
    return label


# -- cut off, and on other devices ----------------------------------------------------------------


def assert_same_end(workdir, whole) -> None:
    """Compares metrics, result and prompt."""
    lines = (read_lines(folder / "metrics.jsonl") for folder in (workdir, whole))
    actual, expected = (list(map(timeless, part)) for part in lines)
    assert actual == expected
    assert timeless(result_of(workdir)) == timeless(result_of(whole))
    actual, expected = (w / "export/prompt.safetensors" for w in (workdir, whole))
    assert actual.read_bytes() == expected.read_bytes()


@pytest.mark.long
def test_sigkill_then_sigterm_then_the_same_end(tmp_path_factory, tmp_path, capsys):
    """In the middle of an epoch, which has 16 steps."""
    whole, workdir = pretrained(tmp_path_factory, "nsp-t5"), tmp_path / "run"
    words = words_of(tmp_path_factory, "nsp-t5", workdir)
    kill(words, tmp_path / "logs", "saved", KILLED)
    code, out, err = stop(words, STOPPED, capsys)
    assert code == 0 and out == "" and f"{STEPS} steps of 16 x 48 tokens, resumed at step 8" in err
    assert not (workdir / "result.json").exists()
    out, err = succeed(capsys, *words)
    assert f"resumed at step {STOPPED}" in err
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
    out, err = succeed(capsys, *words_of(tmp_path_factory, "nss-bert", workdir))
    assert "already pre-trained, nothing to do" in err
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
    config = make_config(
        made(tmp_path_factory, CASES[name].family), data, method, arguments=arguments,
        prompt__init=origin / "export", head__name="verbalizer", task__template="{text} [mask]",
        task__words="terrible,maybe,great", optim__lr=0, train__total_steps=1,
        data__max_len=32, **fields,
    )  # fmt: skip
    result = train_prompt(config, str(tmp_path / "run")).to_json()
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


@pytest.fixture
def start(refused, tmp_path_factory, tmp_path):
    """Starts a case that must be refused, some fields changed. -> its line"""

    def call(name="nsp-t5", started=False, **changes) -> str:
        workdir = tmp_path / "new"
        words = words_of(tmp_path_factory, name, workdir, **changes)
        line = refused(*words, started=started)
        assert not (workdir / "config.json").exists()
        return line

    return call


@pytest.fixture
def forbidden(monkeypatch):
    """Makes opening a backbone, text or weights an error."""

    def forbid(*_args, **_kwargs):
        raise AssertionError("read before the config was checked")

    for name in (
        "build.backbone.folder.resolve",
        "build.corpus.index_corpus",
        "runs.ppt.load_weights",
    ):
        monkeypatch.setattr(f"jaxprompt.{name}", forbid)


# -- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ppt__task": ""}, "ppt.task is empty; give one of nsp, nss, unified, cls"),
        ({"ppt__task": "nsq"}, "ppt.task='nsq' is unknown; nearest: n"),
        ({"ppt__patterns": "fr"}, "ppt.patterns='fr' is unknown; known: en, en_end, en_paper"),
        ({"corpus__path": ""}, "corpus.path is empty; give a folder, a file or a glob"),
        ({"corpus__held_out": 0}, "corpus.held_out=0 leaves no document to evaluate on"),
        ({"prompt__start": "task"}, "prompt.start=task uses words of training examples"),
        ({"trainable": "backbone/.*"}, "pretrain trains only the prompt; empty it"),
        ({"head__name": "linear"}, "head.name=linear does not use label words; set head.name=verb"),
        ({"head__name": "label_rows"}, "head.name=label_rows does not use label words; set"),
        ({"cache__location": "host"}, "cache.location=host caches states of sequences that"),
        ({"ppt__task": "unified", "ppt__max_options": 17}, "2 to 17 options are not valid"),
        ({"ppt__task": "unified", "ppt__min_options": 1}, "1 to 16 options are not valid"),
        ({"ppt__task": "unified", "ppt__min_options": 5, "ppt__max_options": 4}, "5 to 4 options"),
        ({"ppt__task": "cls"}, "ppt.annotations is empty; cls needs the folder that `annotate`"),
        ({"ppt__task": "cls", "ppt__annotations": "/no/where"}, "/no/where has no annotations"),
        ({"task__words": "a,b,c"}, "task.words='a,b,c' has no effect in pretrain, whose examples"),
        ({"data__source": "rows"}, "words come from ppt.task=nsp; leave it out"),
        ({"ppt__hard": True}, "ppt.hard=True has no effect in pretrain"),
        ({"ppt__thresholds": "0.5,1"}, "ppt.thresholds=1 must be in [0, 1)"),
        ({"train__eval_steps": 0, "train__eval_epochs": 0}, "train.eval_epochs=0; set one above 0"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_read(start, forbidden, changes, words):
    assert words in start(**changes)


def test_no_prompt_and_no_task(refused, tmp_path_factory, tmp_path):
    fields = fields_of(tmp_path_factory, "nsp-t5")
    for name in ("prompt.length", "prompt.decoder"):
        fields.pop(name)
    config = tmp_path / "none.py"
    config.write_text(
        "from configs.parts import methods\nfrom configs.ppt import pretrain\n"
        "def get_config():\n    c = pretrain('nsp')\n    methods.full(c)\n    return c\n"
    )
    line = refused(
        "pretrain", f"--config={config}", f"--workdir={tmp_path / 'new'}", *flags(fields)
    )
    assert line.startswith("prompt.name=none has nothing to train; use soft or prefix")


# -- backbone and text ----------------------------------------------------------------------------


def test_patterns_that_a_backbone_cannot_read(start):
    line = start("cls-gpt2", ppt__task="nsp", ppt__patterns="en")
    assert "ppt.task=nsp with ppt.patterns=en has text after [mask], which a gpt2 cannot" in line
    assert "ppt.patterns=en_paper has text after" in start("cls-gpt2", ppt__patterns="en_paper")


def test_an_answer_with_sentinels_that_a_glm_has_not(start):
    message = "task.answer='[mask] {label} [mask]' has [mask], but a GLM has no sentinels"
    assert message in start("nsp-glm", task__answer="[mask] {label} [mask]")


def test_the_folder_of_the_text_is_no_workdir(refused, tmp_path_factory, tmp_path):
    place = shutil.copytree(made(tmp_path_factory, "corpus"), tmp_path / "corpus")
    words = words_of(tmp_path_factory, "nsp-t5", place, corpus__path=str(place))
    line = refused(*words, started=True)
    assert f"--workdir={place} is the folder of corpus.path={place}" in line
    assert sorted(place.iterdir()) == sorted(
        place / path.name for path in made(tmp_path_factory, "corpus").iterdir()
    )


# -- config.runs: each run is as if it had been alone ---------------------------------------------

GRID_STEPS, GRID_SCORED = 6, 2
GRID_KILLED = 5  # SIGKILL, then SIGTERM after this step; what is saved is of GRID_SCORED before
# Tasks with other label words, other decoders, other rows and other held-out examples.
GRID = dict(
    runs__tasks="nsp,nss", runs__seeds="1,2", runs__size=4, data__max_len=100,
    train__total_steps=GRID_STEPS, train__eval_steps=GRID_SCORED,
)  # fmt: skip
NAMES = [f"task={task},seed={seed}" for task in ("nsp", "nss") for seed in (1, 2)]
ALONE = {
    f"runs__{axis}": "()" for axis in ("tasks", "seeds", "lr", "weight_decay", "prompt_starts")
}
ALONE["runs__size"] = 0
SAME = ("task", "method", "seed", "trained", "total", "steps", "skipped", "best_step")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Writes the command of a case's grid in a folder, some fields changed."""
    stores = tmp_path_factory.mktemp("stores")

    def write(workdir: Path, name: str = "nsp-t5", **changes: object) -> list[str]:
        fields = GRID | {"corpus__store": stores / name} | changes
        return words_of(tmp_path_factory, name, workdir, **fields)

    return write


@pytest.fixture(scope="module")
def grid(command, tmp_path_factory):
    """The folder of a grid that nothing disturbs."""
    from jaxprompt.__main__ import main

    folder = tmp_path_factory.mktemp("whole") / "grid"
    assert main(command(folder)) == 0
    return folder


def compare(together: Path, alone: Path) -> None:
    """Compares a run of a grid with the same run alone."""
    actual, right = (json.loads((f / "result.json").read_text()) for f in (together, alone))
    assert {n: actual[n] for n in SAME} == {n: right[n] for n in SAME}
    assert actual["held_out"] == pytest.approx(right["held_out"], rel=1e-3)
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-3)
    assert scores(together) == [pytest.approx(value, rel=1e-3) for value in scores(alone)]
    for file in ("config.json", "record.json"):
        actual, expected = (json.loads((f / file).read_text()) for f in (together, alone))
        assert actual == expected
    lines, others = (read_lines(f / "metrics.jsonl") for f in (together, alone))
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys() and line["time"].keys() == other["time"].keys()
        if "scores" in line:
            assert line["scores"] == pytest.approx(other["scores"], rel=1e-3)


@pytest.mark.long
def test_every_run_is_as_if_alone(command, grid, tmp_path, capsys):
    fields = dict(ppt__task="nss", seed=1, **ALONE)
    succeed(capsys, *command(tmp_path / "alone", **fields))
    compare(grid / "task=nss,seed=1", tmp_path / "alone")


@pytest.mark.long
def test_killed_and_stopped_it_ends_with_the_same_bits(command, grid, tmp_path, capsys):
    folder = tmp_path / "grid"
    words = command(folder)
    kill(words, tmp_path / "logs", "taken", GRID_KILLED)
    code, out, err = stop(words, GRID_KILLED, capsys)
    assert code == 0 and out == "" and f"resumed at step {GRID_KILLED - 1}" in err
    assert f"stopped by SIGTERM at step {GRID_KILLED}" in err and not results(folder)
    _, err = succeed(capsys, *words)
    assert f"4 runs at once, {GRID_STEPS} steps, resumed at step {GRID_KILLED}" in err
    for name in NAMES:
        assert timeless(results(folder)[name]) == timeless(results(grid)[name])
        lines, right = (read_lines(f / name / "metrics.jsonl") for f in (folder, grid))
        assert list(map(timeless, lines)) == list(map(timeless, right))
        numbers, others = (arrays(f / name, "best")[0] for f in (folder, grid))
        for leaf in others:
            assert numbers[leaf].tobytes() == others[leaf].tobytes()


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"runs__words": "'a,b,c','d,e,f'"}, "config.runs.words is for tuning, pre"),
        ({"runs__prompt_starts": "normal,task"}, "prompt.start=task uses words of training"),
        ({"runs__tasks": "nsp,nsq"}, "runs.tasks='nsq' is unknown; nearest: "),
        ({"runs__tasks": "nsp,cls"}, "ppt.annotations is empty; cls needs the folder that"),
    ],
)  # fmt: skip
def test_a_grid_that_is_wrong(changes, line, refused, command, tmp_path):
    assert line in refused(*command(tmp_path / "new", **changes))
    assert not (tmp_path / "new/config.json").exists()


def test_train_has_no_tasks(refused, data, backbone, tmp_path):
    words = flags(tiny_fields(backbone, data) | {"runs.tasks": "nsp,nss"})
    line = refused("train", f"--config={BASE}", f"--workdir={tmp_path / 'new'}", *words)
    assert line.startswith("ppt.task=nsp pre-trains a prompt, which is only valid with")
