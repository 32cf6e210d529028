"""What launch/ runs: recipes of small backbones, a paper's table, examples of pre-training."""

import contextlib
import io
import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from tiny_pretrain import corpus_texts, make_kind
from tiny_run import ROOT, flags, sentences, succeed, write_rows

from jaxprompt.__main__ import main
from jaxprompt.config.files import load_module
from jaxprompt.errors import InputError
from launch.papers import core as paper

small = load_module(str(ROOT / "launch" / "small.py"))
PLAN = dict(
    data__batch=16, data__eval_batch=16, backbone__dtype="float32", train__total_steps=6,
    train__eval_steps=3, train__save_steps=3, optim__schedule__warmup_steps=1,
)  # fmt: skip
T5 = dict(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    texts = [". ".join(row["text"] for row in sentences(seed, 8)) for seed in range(40)]
    return write_rows(path, [{"text": text} for text in texts])


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Runs the commands in this process; notes them."""
    called = []

    def call(command, *words):
        called.append((command, *words))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main([command, *words])
        if code:
            raise subprocess.CalledProcessError(code, command)
        return out.getvalue()

    monkeypatch.setattr(small, "call", call)
    monkeypatch.setattr(small, "DEV_ROWS", 16)
    monkeypatch.setattr(small, "T5", small.T5 | T5)
    monkeypatch.setattr(small, "T5_TOKENS", 300)
    return called


@pytest.fixture
def recipe(corpus, tmp_path, monkeypatch, capsys):
    """Runs a recipe. -> its report"""

    def run(*words):
        for stage in ("mlm", "rtd", "span_corruption", "prefix_lm"):
            (tmp_path / "work").mkdir(exist_ok=True)
            (tmp_path / "work" / f"{stage}.json").write_text(json.dumps(PLAN))
        argv = ["--corpus", str(corpus), "--workdir", str(tmp_path / "work"), "--minutes=0.01"]
        argv += ["--config.data.max_len=24", "--config.corpus.held_out=0.2"]
        monkeypatch.setattr("sys.argv", ["small.py", *words, *argv])
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "set by the tests")
        small.main()
        report = (tmp_path / "work" / "report.md").read_text()
        assert report == capsys.readouterr().out.removesuffix("\n")
        return report

    return run


def scores(report, name):
    """Reads a row of the table of held-out scores."""
    (line,) = [line for line in report.splitlines() if line.startswith(f"| {name} |")]
    return [float(cell) for cell in line.split("|")[2:-1]]


@pytest.mark.long
def test_a_masked_lm_is_made_once_and_compared(recipe, backbone, tmp_path, here):
    report = recipe("mlm", f"--backbone={backbone}", "--against", str(backbone))
    result = json.loads((tmp_path / "work" / "mlm" / "result.json").read_text())
    adapted, initial = scores(report, "mlm"), scores(report, backbone)
    assert adapted == pytest.approx(list(result["held_out"].values()), rel=1e-3)
    assert adapted[0] < initial[0]  # the backbone's own head, on the same rows
    assert report.count("\n[CLS]") == 10
    here.clear()
    assert recipe("mlm", f"--backbone={backbone}", "--against", str(backbone)) == report
    assert len(here) == 2  # what is done is not tried or trained again


@pytest.mark.long
def test_a_discriminator_begins_with_a_generator(recipe, backbone, tmp_path):
    report = recipe("electra", f"--backbone={backbone}", f"--generator={backbone}")
    config = json.loads((tmp_path / "work" / "rtd" / "generator" / "config.json").read_text())
    assert config["model_type"] == "bert" and config["hidden_size"] == 32
    assert "majority" in report and "[+" in report or "[-" in report


@pytest.mark.long
def test_a_t5_is_made_from_nothing(recipe, tmp_path, here):
    report = recipe("t5")
    assert report.index("## span_corruption") < report.index("## prefix_lm")
    assert "truth:  <extra_id_0>" in report
    config = json.loads((tmp_path / "work" / "prefix_lm" / "backbone" / "config.json").read_text())
    assert config["d_model"] == 16 and config["vocab_size"] == 300
    assert [words[0] for words in here].count("tokenizer") == 1


def test_scratch_takes_the_shape_alone(backbone, tmp_path):
    fields = dict(kind="mlm", corpus="x", backbone=str(backbone), scratch=True)
    (stage,) = small.stages(SimpleNamespace(**fields), tmp_path)
    assert stage.fields["backbone.init"] == backbone / "config.json"
    assert stage.fields["backbone.path"] == str(backbone)  # for the tokenizer


@pytest.mark.parametrize(
    "words, message",
    [
        (["--minutes=0"], "--minutes=0 must be above 0"),
        (["--steps=3"], "unknown flag --steps=3"),
    ],
)
def test_bad_flags(monkeypatch, capsys, words, message):
    argv = ["small.py", "mlm", "--corpus=x", "--workdir=y", *words]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as end:
        small.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_what_a_verb_refuses_ends_the_recipe(monkeypatch, tmp_path, backbone, capsys):
    work = tmp_path / "work"
    argv = ["small.py", "mlm", "--corpus", str(tmp_path / "none"), "--workdir", str(work)]
    argv += ["--config.data.max_len=24"]
    monkeypatch.setattr("sys.argv", [*argv, f"--backbone={backbone}"])
    with pytest.raises(SystemExit) as end:
        small.main()
    assert end.value.code == 2 and "none" in capsys.readouterr().err
    assert not (work / "report.md").exists()


@pytest.mark.parametrize(
    "kind, count, speeds, batch",
    [
        ("cpu", 1, {16: 100, 32: 110}, 16),
        ("cpu", 1, {16: 100, 32: 140}, 32),
        ("cpu", 2, {32: 100, 64: 200}, 64),
        ("gpu", 1, {64: 100, 128: 200, 256: 390, 512: 400}, 256),
        ("gpu", 1, {64: 100, 128: 200, 256: None}, 128),  # it does not fit
    ],
)
def test_the_batch_is_what_gains_speed_and_the_steps_fill_the_minutes(
    monkeypatch, tmp_path, kind, count, speeds, batch
):
    def adapt(args, stage, folder, *, data__batch, **fields):
        speed = speeds[data__batch]
        if speed is None:
            raise subprocess.CalledProcessError(1, "adapt")
        pace = {"tokens_per_second": speed, "steps_per_second": speed / data__batch}
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 12, "time": pace}) + "\n")

    monkeypatch.setattr(small, "adapt", adapt)
    monkeypatch.setattr(small, "device", lambda: (kind, count))
    args = SimpleNamespace(minutes=100)
    plan = small.plan_stage(args, small.Stage("mlm", 0.5, {}), tmp_path)
    assert plan["data__batch"] == plan["data__eval_batch"] == batch
    assert plan["backbone__dtype"] == {"cpu": "float32", "gpu": "bfloat16"}[kind]
    seconds = plan["train__total_steps"] * batch / speeds[batch]
    assert 0.8 * 3000 < seconds < 3000
    monkeypatch.setattr(small, "adapt", None)
    assert small.plan_stage(args, small.Stage("mlm", 0.5, {}), tmp_path) == plan  # kept


# -- launch/papers --------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """A folder of data sets, of which there is one."""
    folder = tmp_path / "data"
    (folder / "sst2").mkdir(parents=True)
    for part, size in (("train", 40), ("test", 60)):
        rows = [
            {"sentence": row["text"], "label": int(row["label"] == "beast")}
            for row in sentences(len(part), size)
        ]
        write_rows(folder / "sst2" / f"{part}.jsonl", rows)
    return folder


@pytest.mark.long
def test_rows_that_train_nothing_are_evaluated(data, backbone, capsys, tmp_path):
    """Beside a row that trains with each of the batches that are searched."""
    work = tmp_path / "work"
    words = [f"--workdir={work}", f"--backbone={backbone}", f"--data={data}"]
    words += ["--tasks=sst2", "--seeds=10", "--learning-rates=0.001"]
    overrides = {
        "data.protocol.on_shortage": "use_fewer", "demos.total": 2, "data.max_len": 60,
        "mesh.data": 1,
        "train.total_steps": 2, "train.eval_steps": 1, "train.tracker": "none",
        "task.words": "bad,good",
    }  # fmt: skip
    rows = "--rows=majority;zero_shot;in_context;lm_bff"
    assert paper.main(["dart", "table1", rows, *words, *flags(overrides)]) == 0
    output = capsys.readouterr()
    assert "table1: 6 runs, 0 of them finished" in output.err
    results = {
        path.parent.name: json.loads(path.read_text())["test"]
        for path in work.glob("*/result.json")
    }
    assert sorted(results) == sorted(
        [f"{name}-sst2,seed=10" for name in ("majority", "zero_shot", "in_context")]
        + [f"lm_bff-sst2,lr=0.001,batch={n},seed=10" for n in (2, 4, 8)]
    )
    assert results["majority-sst2,seed=10"]["accuracy"] == pytest.approx(2 / 3)  # no beast
    shot = f"--config={ROOT}/configs/dart/lm_bff.py:sst2,zero_shot"
    changed = overrides | {"backbone.path": backbone, "data.source": data / "sst2"}
    changed |= {"data.seed": 10}  # of what demos.total shows here in every row
    out, _ = succeed(capsys, "evaluate", shot, *flags(changed), "--split=test")
    assert json.loads(out)["accuracy"] == results["zero_shot-sst2,seed=10"]["accuracy"]
    head, *lines = output.out.split("\n\n")[1].splitlines()[2:]
    assert head == "| majority | 66.7 ± 0.0 [50.9] |" and len(lines) == 3
    assert (
        "data.batch" not in output.out
        and "data.protocol.on_shortage=use_fewer (raise)" in output.out
    )
    before = (work / "zero_shot-sst2,seed=10/result.json").stat().st_mtime_ns
    assert paper.main(["dart", "table1", rows, *words, *flags(overrides)]) == 0
    assert "6 runs, 6 of them finished" in capsys.readouterr().err
    assert (work / "zero_shot-sst2,seed=10/result.json").stat().st_mtime_ns == before
    other = shutil.copytree(backbone, tmp_path / "other")
    words[1] = f"--backbone={other}"
    with pytest.raises(InputError, match="2 runs failed"):
        paper.main(["dart", "table1", "--rows=zero_shot;in_context", *words, *flags(overrides)])
    assert "contains a run with a different config: backbone.path" in capsys.readouterr().err


# -- launch/accuracy ------------------------------------------------------------------------------

module = load_module(str(ROOT / "launch" / "accuracy" / "examples.py"))


def test_examples_are_those_of_the_task(tmp_path, monkeypatch):
    texts = corpus_texts()
    corpus = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    backbone = make_kind(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr(module, "SPLITS", {"train": (0, 60), "dev": (1, 20), "test": (1, 20)})
    settings = {"corpus.path": str(corpus), "backbone.path": str(backbone), "data.max_len": "48"}
    settings |= {"backbone.dtype": "float32", "prompt.length": "2", "ppt.matched": "False"}
    actual = module.write_examples("nsp", list(settings.items()), str(tmp_path / "out"))
    assert actual == {"train": 60, "dev": 20, "test": 20}
    lines = {split: (tmp_path / "out/nsp" / f"{split}.jsonl").read_text() for split in actual}
    rows = {split: list(map(json.loads, text.splitlines())) for split, text in lines.items()}

    document = {unit: i for i, text in enumerate(texts) for unit in text.split("\n")}
    units = [text.split("\n") for text in texts]
    beside = {frozenset(pair) for text in units for pair in zip(text[:-1], text[1:], strict=True)}
    learned, held_out = set(), set()
    for split, count in actual.items():
        assert len(rows[split]) == count and {row["label"] for row in rows[split]} == {0, 1, 2}
        for row in rows[split]:
            first, second = row["text"].split("? ")
            (learned if split == "train" else held_out).update((document[first], document[second]))
            assert (frozenset((first, second)) in beside) == (row["label"] == 2)
            assert (document[first] == document[second]) == (row["label"] > 0)
    assert not learned & held_out
    assert lines["dev"] != lines["test"]
