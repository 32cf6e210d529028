"""What `inspect` finds and writes, for every method and kind of answer, on tiny runs."""

import contextlib
import functools
import html
import io
import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from test_token_heads import KINDS, STILL
from tiny_run import TOPICS, jaxprompt, make_backbone, make_config, write_rows

from jaxprompt import tree
from jaxprompt.__main__ import main
from jaxprompt.build.task import eval_batches
from jaxprompt.runs.restore import restore
from jaxprompt.runs.train import run
from jaxprompt.scoring.separation import class_separation
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.evaluation import predict_scores

pytest.importorskip("matplotlib")

KEPT = {"train.total_steps": 4, "train.eval_steps": 2, "train.keep": 9, "backbone.dropout": 0}
DART = {
    "head.name": "label_rows", "task.template": "{text} it was about [soft*2] [mask]",
    "task.words": "beast,food,tool", "optim.lr": 0.1, "prompt.length": 2,
}  # fmt: skip
VERBALIZER = {
    "head.name": "verbalizer", "task.template": "{text} it was [mask]",
    "task.words": "beast,food,tool",
}  # fmt: skip
RUNS = {
    "bert soft": ("bert", "soft", {"prompt.length": 4, "optim.lr": 0.3}, {}),
    "bert prefix": ("bert", "prefix", {"optim.lr": 0.1}, {"layers": "2-2"}),
    "bert verbalizer": ("bert", "soft", VERBALIZER | {"optim.lr": 0.3}, {}),
    "dart": ("bert", "dart", DART, {"length": 2, "text": "it was", "lr": 0.1}),
    "t5 prefix": ("t5", "prefix", VERBALIZER, {"decoder": 2, "cross": 3}),
    "gpt2 soft": ("gpt2", "soft", VERBALIZER | {"optim.lr": 0.3}, {}),
    "llama prefix": ("llama", "prefix", VERBALIZER, {}),
    "head alone": ("bert", "head_only", {}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def backbones(tmp_path_factory, backbone):
    """Folders by family, made once they are asked for."""
    made = {"bert": backbone}

    def find(family):
        if family not in made:
            made[family] = make_backbone(tmp_path_factory.mktemp(family) / family, family)
        return made[family]

    return find


@pytest.fixture(scope="module")
def runs(backbones, data, tmp_path_factory):
    """(name) -> workdir of a finished run of RUNS, its config"""
    made = {}

    def find(name):
        if name not in made:
            family, method, fields, arguments = RUNS[name]
            workdir = tmp_path_factory.mktemp("run") / "run"
            c = make_config(backbones(family), data, method, arguments=arguments, **KEPT, **fields)
            assert run(c, str(workdir)) is not None
            made[name] = workdir, c
        return made[name]

    return find


def look(workdir, *words):
    """-> stdout, the JSON, the page"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["inspect", f"--workdir={workdir}", *words]) == 0
    folder = workdir / "inspect"
    page = (folder / "inspect.html").read_text("utf-8")
    return out.getvalue(), json.loads((folder / "inspect.json").read_text("utf-8")), page


@pytest.fixture(scope="module")
def looked_at(runs):
    """(name) -> what `look` gives of a run of RUNS, at its last step"""
    return functools.cache(lambda name: look(runs(name)[0], "--top=4", "--steps=4"))


def pictures(workdir):
    return sorted(path.name for path in (workdir / "inspect").glob("*.png"))


SLOW = ("bert verbalizer", "t5 prefix", "gpt2 soft")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]
)
def test_every_run_has_its_page(name, runs, looked_at):
    workdir, _ = runs(name)
    out, found, page = looked_at(name)
    assert [own["step"] for own in found["separation"]] == [0, 2, 4]
    assert np.isfinite([own["ratio"] for own in found["separation"]]).all()
    assert np.array(found["confusion"]["counts"]).sum() == 30
    drawn = {"pca-4.png", "tsne-4.png", "ratio.png", "confusion.png", "curves.png"}
    assert drawn <= set(pictures(workdir))
    kinds = [row["kind"] for row in found["rows"]]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    wanted = {"dart": {"soft token": 2, "label row": 3}}
    rows = {} if "prefix" in name or name == "head alone" else {"soft token": 4}
    assert counts == wanted.get(name, rows)
    assert all(len(row["nearest"]) == 4 for row in found["rows"])
    assert ("rows" in found["notes"]) == (not kinds)
    assert ("labels" in found["notes"]) == (name != "dart")
    streams = {"t5 prefix": {"encoder", "decoder", "cross"}, "head alone": set()}
    assert set(found["attention"]) == streams.get(name, {"encoder"})
    assert ("attention" in found["notes"]) == (name == "head alone")
    for text in found["notes"].values():
        assert text in html.unescape(page) and "\n" not in text
    assert page.count("<img ") == len(pictures(workdir)) == len(re.findall("data:image/png", page))
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page
    assert all(row["name"] in out for row in found["rows"])


@pytest.mark.long
def test_nearest_words_are_those_of_the_whole_vocabulary(runs, looked_at):
    """By plain numpy over the word table; the start is what the run's seed draws."""
    (workdir, c), (_, found, _) = runs("dart"), looked_at("dart")
    trained = restore(c, str(workdir), ["dev"])
    params = tree.merge(trained.weights.trainable, trained.weights.frozen)
    table = np.asarray(params["backbone"]["embed"]["word"]["table"], np.float64)
    rows = [*np.asarray(params["prompt"]["table"]), *np.asarray(params["prompt"]["rows"])]
    names = [row["name"] for row in found["rows"]]
    assert names == ["1", "2", *TOPICS]
    for row, said in zip(rows, found["rows"], strict=True):
        cosines = table @ row / np.linalg.norm(table, axis=1) / np.linalg.norm(row)
        best = np.argsort(-cosines, kind="stable")[:4]
        assert [word["id"] for word in said["nearest"]] == best.tolist()
        wanted = trained.scorer.tokenizer.convert_ids_to_tokens(best.tolist())
        assert [word["token"] for word in said["nearest"]] == wanted
        found_cosines = [word["cosine"] for word in said["nearest"]]
        np.testing.assert_allclose(found_cosines, cosines[best], atol=1e-4)
    starts = [row["start"]["token"] for row in found["rows"]]
    assert starts == ["it", "was", "beast", "food", "tool"]
    assert all(row["start"]["cosine"] == 1 for row in found["rows"])
    assert all(row["cosine_with_start"] < 0.9999 for row in found["rows"])


def test_words_near_the_tasks_soft_tokens_are_marked(runs, looked_at):
    """By plain numpy: the first rows are those of the template, the label rows stand apart."""
    (workdir, c), (out, found, page) = runs("dart"), looked_at("dart")
    trained = restore(c, str(workdir), ["dev"])
    params = tree.merge(trained.weights.trainable, trained.weights.frozen)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    words = unit(np.asarray(params["backbone"]["embed"]["word"]["table"], np.float64))
    soft = unit(np.asarray(params["prompt"]["table"], np.float64))
    assert len(found["instances"]) == 5 and "prompts-pca.png" not in pictures(workdir)
    for case in found["instances"]:
        ids = trained.scorer.tokenizer.convert_tokens_to_ids(case["tokens"])
        np.testing.assert_allclose(case["cosines"], (words[ids] @ soft.T).max(1), atol=1e-5)
        order = np.argsort(-np.array(case["cosines"]), kind="stable")[:4]
        assert case["nearest"] == sorted(order.tolist())
        assert f"<mark>{case['tokens'][case['nearest'][0]]}</mark>" in page
        assert f"[{case['tokens'][case['nearest'][0]]}]" in out


@pytest.mark.long_cases("dart")
@pytest.mark.parametrize("name", ["bert verbalizer", "dart"])
def test_states_are_those_at_the_mask(name, runs, looked_at):
    """R_D of the last layer at label_pos, by the model itself, at every step that is kept."""
    (workdir, c), (_, found, _) = runs(name), looked_at(name)
    trained = restore(c, str(workdir), ["dev"])
    scorer, part = trained.scorer, trained.splits["dev"]
    checkpoints = Checkpoints(workdir)
    step_of = jax.jit(
        lambda params, batch: (
            batch.index,
            scorer.model.hidden(params, batch)[np.arange(64), batch.label_pos[:, 0]],
        )
    )
    for own in found["separation"][1:]:
        numbers = checkpoints.restore_trainable(trained.weights.trainable, own["step"])
        params = tree.merge(numbers, trained.weights.frozen)
        states = predict_scores(
            lambda t, f, p=params: functools.partial(step_of, p), {}, {},
            eval_batches(scorer, part), 30,
        )  # fmt: skip
        np.testing.assert_allclose(
            own["ratio"], class_separation(states, part.labels).ratio, rtol=1e-5
        )


@pytest.mark.long
def test_a_run_that_learns_nothing_stays_where_it_starts(backbone, data, tmp_path):
    fields = KEPT | {"optim.lr": 0, "optim.weight_decay": 0, "train.total_steps": 3}
    fields |= {"train.eval_steps": 1, "train.keep": 3}
    c = make_config(backbone, data, "soft", **fields)
    run(c, str(tmp_path / "run"))
    _, found, _ = look(tmp_path / "run", "--steps=2")
    assert [row["cosine_with_start"] for row in found["rows"]] == [1] * 4
    assert [own["step"] for own in found["separation"]] == [0, 1, 2, 3]  # more than two are kept
    first, *_, last = found["separation"]
    assert first["ratio"] == pytest.approx(last["ratio"], rel=1e-6)
    assert not [name for name in pictures(tmp_path / "run") if name.endswith("-0.png")]


@pytest.mark.long
def test_confusion_is_what_evaluate_scores(runs, looked_at, capsys):
    (workdir, _), (_, found, _) = runs("bert prefix"), looked_at("bert prefix")
    code, out, _ = jaxprompt(capsys, "evaluate", f"--workdir={workdir}")
    counts = np.array(found["confusion"]["counts"])
    assert code == 0 and np.trace(counts) / 30 == pytest.approx(json.loads(out)["accuracy"])


@pytest.mark.long
def test_without_wishes_a_few_steps_and_examples_are_drawn(runs, tmp_path):
    """Of another split; what an earlier look drew is gone."""
    workdir = shutil.copytree(runs("head alone")[0], tmp_path / "run")
    (workdir / "inspect").mkdir(exist_ok=True)
    (workdir / "inspect/pca-99.png").touch()
    _, found, page = look(workdir, "--examples=9", "--split=test")
    assert any("9 of the 24 inputs of test" in line for line in found["remarks"])
    assert "sampled at random" in page and np.array(found["confusion"]["counts"]).sum() == 24
    assert [name for name in pictures(workdir) if "-" in name] == [
        f"{kind}-{step}.png" for kind in ("pca", "tsne") for step in (0, 2, 4)
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_classes_says_so(kind, backbone, tmp_path):
    make, fields = KINDS[kind]
    for seed, (name, size) in enumerate({"train": 12, "dev": 6, "test": 6}.items()):
        write_rows(tmp_path / f"{name}.jsonl", make(seed, size))
    still = STILL | {"train.total_steps": 2, "train.eval_steps": 2}
    c = make_config(backbone, tmp_path, "prefix", **still, **fields)
    run(c, str(tmp_path / "run"))
    _, found, page = look(tmp_path / "run")
    assert {"rows", "labels", "states", "confusion"} == set(found["notes"])
    assert all(text in page for text in found["notes"].values())
    assert pictures(tmp_path / "run") == ["attention-encoder.png", "curves.png"]


# -- bad input ------------------------------------------------------------------------------------


def test_what_is_asked_for_must_be_there(runs, refused, tmp_path, capsys):
    workdir, _ = runs("bert verbalizer")
    asked = lambda *words: refused("inspect", f"--workdir={workdir}", *words)
    assert "--top=0 must be at least 1" in asked("--top=0")
    assert "--examples=3 must be at least 4" in asked("--examples=3")
    assert "--steps=x must be a list of steps" in asked("--steps=2,x")
    assert "--split='all' is unknown; known: dev, test, train" in asked("--split=all")
    line = asked("--steps=0,3")
    assert "--steps=3: " in line and "only of steps 0, 2, 4" in line and "train.keep" in line
    assert not (workdir / "inspect" / "pca-3.png").exists()
    copy = shutil.copytree(workdir, tmp_path / "copy")
    (copy / "inspect" / "old.png").mkdir(parents=True)
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={copy}")
    assert code == 2 and f"cannot write {copy / 'inspect'}" in err.splitlines()[-1]
    assert "--workdir is missing" in refused("inspect")
    line = refused("inspect", f"--workdir={tmp_path / 'none'}")
    assert "config.json does not exist; give the --workdir of a run" in line


def test_a_run_that_has_not_saved_yet(runs, refused, tmp_path):
    workdir, _ = runs("bert verbalizer")
    young = shutil.copytree(workdir, tmp_path / "young", ignore=lambda *_: ["checkpoints"])
    (young / "result.json").unlink()
    assert "no checkpoint in " in (line := refused("inspect", f"--workdir={young}"))
    assert "train first" in line


def test_matplotlib_is_an_extra(runs, refused, monkeypatch):
    monkeypatch.setattr("jaxprompt.training.pictures.can_draw", lambda: False)
    workdir, _ = runs("bert verbalizer")
    line = refused("inspect", f"--workdir={workdir}")
    assert "needs matplotlib; pip install matplotlib" in line


# -- the page in a browser ------------------------------------------------------------------------

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
     if (path := shutil.which(name))), None,
)  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_renders_offline(width, runs, looked_at, tmp_path):
    """In headless Chromium: every picture has a size, none is wider than the page, no request."""
    workdir, _ = runs("dart")
    _, _, page = looked_at("dart")
    # The page runs no script: the one that measures is of the frame around it, which is as wide as
    # a phone or a screen where Chromium's own window cannot be.
    measure = """<script>onload = () => {
      const {contentDocument: page, contentWindow: window} = document.querySelector("iframe")
      document.title = JSON.stringify({
        sizes: [...page.images].map(i => [i.complete, i.naturalWidth, i.clientWidth]),
        loaded: window.performance.getEntriesByType("resource").map(e => e.name)
          .filter(n => !n.startsWith("data:")),
        wide: page.documentElement.scrollWidth, room: window.innerWidth }) }</script>"""
    frame = f'<iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>'
    (tmp_path / "page.html").write_text(f"<title></title>{measure}{frame}", "utf-8")
    log = tmp_path / "net.json"
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,1000",
         f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--dump-dom",
         (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stderr[-2000:]
    found = json.loads(title[1])
    assert len(found["sizes"]) == len(pictures(workdir)) > 5
    assert all(complete and natural > 0 and 0 < shown <= width
               for complete, natural, shown in found["sizes"])  # fmt: skip
    assert found["loaded"] == [] and found["wide"] <= found["room"] == width
    # What Chromium asks for of its own accord is not the page's.
    asked = re.findall(r'"url":"(https?://[^"]*)"', log.read_text("utf-8", errors="replace"))
    own = ("google", "gstatic", "chrome", "clients2", "localhost", "127.0.0.1")
    assert [url for url in asked if not any(word in url for word in own)] == []
