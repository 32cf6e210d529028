"""Runs that cache the states of frozen layers: the same results, and what cannot be cached."""

import json
import re
import shutil

import numpy as np
import pytest
from spoil import edit
from tiny_pretrain import stop
from tiny_run import (
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    sentences,
    timeless,
    write_rows,
)

from jaxprompt.__main__ import main
from jaxprompt.runs.train import train_prompt

# Dropout above what is kept stays.
COMMON = dict(
    backbone__dropout=0, train__total_steps=4, train__eval_steps=2, train__log_steps=1
)  # fmt: skip
LENGTHS = dict(data__multiple=4)  # batches of several lengths
UPPER = dict(prompt__layers="2-2", prompt__dropout=0.1)
MLM = {"head.name": "verbalizer", "task.words": "beast,food,tool", "trainable": "backbone/mlm/.*"}
MLM |= {"task.template": "{text} about [mask] ."}
DECODER = dict(prompt__length=0, prompt__decoder=2, prompt__cross=3, prompt__dropout=0.1)
LEFT = UPPER | LENGTHS | dict(data__padding_side="left")
CASES = {
    "bert_left": ("bert", "prefix", LEFT | dict(optim__accumulate=2)),
    "bert_head": ("bert", "head_only", {}),
    "bert_mlm": ("bert", "head_only", MLM),
    "bert_mesh": ("bert", "prefix", UPPER | dict(mesh__data=4, mesh__model=2, mesh__fsdp=True)),
    "t5_upper": ("t5", "prefix", UPPER | dict(prompt__decoder=2)),
    "t5_decoder": ("t5", "prefix", DECODER),
    "t5_head": ("t5", "head_only", LENGTHS),
    "gpt2_upper": ("gpt2", "prefix", UPPER | LENGTHS),
}
SPARED = {"bert_head", "bert_mlm", "t5_head"}  # of all tokens


@pytest.fixture(scope="module")
def folders(dropping, tmp_path_factory):
    made = {x: make_backbone(tmp_path_factory.mktemp(x) / x, x) for x in ("t5", "gpt2")}
    return made | {"bert": dropping}


def losses(folder):
    """Lists the loss of each step."""
    lines = read_lines(folder / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


def start(folder, *args, **fields):
    """Runs a config. Returns its result and its losses."""
    result = train_prompt(make_config(*args, **fields), str(folder)).to_json()
    return timeless(result), losses(folder)


def assert_same_run(folder, *args, **fields):
    """Runs a config with a cache and without: the results are equal. Returns the losses."""
    cache = {name: fields.pop(name) for name in list(fields) if name.startswith("cache__")}
    expected, exact = start(folder / "off", *args, **fields)
    result, cached = start(folder / "on", *args, **fields, **cache)
    np.testing.assert_allclose(cached, exact, rtol=1e-5)
    assert result == expected
    return exact


def test_progress_of_what_is_kept_is_reported(folders, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxprompt.training.pace.REPORT_SECONDS", -1.0)
    start(tmp_path, folders["bert"], data, "head_only", **COMMON, cache__location="host")
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("computing the")]
    counts = [re.search(r"reads: (\d+)/(\d+) examples, ", line).groups() for line in lines]
    done = [int(number) for number, _ in counts]
    total = sum(len(read_lines(data / f"{name}.jsonl")) for name in ("train", "dev"))
    assert done == sorted(set(done)) and done[-1] == total
    assert {int(number) for _, number in counts} == {total}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_keeps_is_the_same_run(case, folders, data, tmp_path, capsys):
    family, method, fields = CASES[case]
    fields = COMMON | fields | dict(cache__location="host")
    exact = assert_same_run(tmp_path, folders[family], data, method, **fields)
    err = capsys.readouterr().err
    assert len(exact) == 4 and exact[0] != exact[-1]
    assert "GiB in host memory" in err
    assert ("sequences x 1 tokens" in err) == (case in SPARED)


@pytest.mark.long
def test_texts_are_learned_from_what_is_kept_and_written_in_full(folders, tmp_path):
    """A T5 whose decoder alone is prompted."""
    for seed, (name, size) in enumerate({"train": 48, "dev": 12, "test": 12}.items()):
        rows = [{"text": r["text"], "answer": r["label"]} for r in sentences(seed, size)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    fields = {"head.name": "text", "task.target": "answer", "data.max_target": 6}
    fields |= {"generate.max_new_tokens": 3} | COMMON | DECODER | dict(train__eval_steps=4)
    fields |= dict(cache__location="disk")
    assert_same_run(tmp_path, folders["t5"], tmp_path, "prefix", **fields)
    assert not (tmp_path / "on/kept/dev.states").exists()


@pytest.mark.long
@pytest.mark.parametrize("method, fields", [("prefix", UPPER), ("head_only", {})])
def test_choices_are_kept_row_by_row(method, fields, folders, tmp_path):
    """Examples of two and three choices, each a row of its own length."""
    rng, words = np.random.default_rng(0), "cat dog bread rice hammer saw the a very old".split()
    draw = lambda most: " ".join(rng.choice(words, rng.integers(1, most)))
    for name, size in {"train": 20, "dev": 12, "test": 4}.items():
        rows = [
            {"text": draw(4), "options": [draw(6) for _ in range(2 + i % 2)], "label": i % 2}
            for i in range(size)
        ]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    fields = COMMON | fields | {
        "task.choices": "options", "task.template": "{text} [sep] {choice}", "data.batch": 4,
        "data.eval_batch": 5, "head.pooler": "cls", "cache.location": "host",
    }  # fmt: skip
    fields = {name.replace(".", "__"): value for name, value in fields.items()}
    assert_same_run(tmp_path, folders["bert"], tmp_path, method, **fields)


# -- disk -----------------------------------------------------------------------------------------


@pytest.fixture
def config(folders, data, tmp_path):
    """Writes the config of a run that caches on disk. Returns its path."""

    def write(**changes):
        fields = COMMON | UPPER | dict(cache__location="disk", cache__folder=tmp_path / "kept")
        c = make_config(folders["bert"], data, "prefix", **fields | changes)
        path = tmp_path / "c.json"
        path.write_text(c.to_json())
        return path

    return write


@pytest.mark.long
def test_a_resumed_run_and_another_seed_read_what_is_there(config, tmp_path, capsys):
    def words(name, **changes):
        return ["train", f"--config={config(**changes)}", f"--workdir={tmp_path / name}"]

    def train(name, **changes):
        code, out, err = jaxprompt(capsys, *words(name, **changes))
        assert code == 0, err
        return out, err

    whole = json.loads(train("off", cache__location="", cache__folder="")[0])
    code, out, err = stop(words("run"), 2, capsys)
    assert code == 0 and out == "" and "stopped by SIGTERM at step 2" in err
    assert "earlier" not in err
    before = (tmp_path / "kept/train.states").stat().st_mtime_ns
    out, err = train("run")
    assert "resumed at step 2" in err and "(reused from an earlier run: train, dev)" in err
    assert timeless(json.loads(out)) == timeless(whole)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "off"), rtol=1e-5)
    assert "(reused from an earlier run: train, dev)" in train("seed", seed=3)[1]
    assert (tmp_path / "kept/train.states").stat().st_mtime_ns == before


@pytest.mark.long
def test_a_folder_of_something_else_is_refused(config, refused, data, other_backbone, tmp_path):
    run_config = json.loads(config().read_text())
    assert main(["train", f"--config={config()}", f"--workdir={tmp_path / 'run'}"]) == 0

    def line(**changes):
        return refused("train", f"--config={config(**changes)}", f"--workdir={tmp_path / 'new'}")

    message = line(cache__dtype="bfloat16")
    assert message.startswith(f"{tmp_path / 'kept'} has states cached for a different setup: ")
    assert "cache.dtype (cached 'float32', now 'bfloat16'); use another cache.folder" in message
    assert "the backbone's weights (cached '" in line(backbone__path=other_backbone)
    assert "the first positions (cached '4 and 0', now '5 and 0')" in line(prompt__length=5)
    # The weights are the same: what config.json says of the layers is not.
    mended = shutil.copytree(run_config["backbone"]["path"], tmp_path / "mended")
    hf = json.loads((mended / "config.json").read_text())
    (mended / "config.json").write_text(json.dumps(hf | {"layer_norm_eps": 1e-3}))
    assert "the backbone's layers (cached '" in line(backbone__path=mended)
    (tmp_path / "rows").mkdir()
    for name in ("train", "dev", "test"):
        text = (data / f"{name}.jsonl").read_text()
        (tmp_path / "rows" / f"{name}.jsonl").write_text(text.replace("very", "quite"))
    assert "the data (cached '48 examples, CRC " in line(data__source=tmp_path / "rows")
    changed = {"task.template": "{text} ."}
    assert "the template (cached '{text}', now '{text} .')" in line(**changed)
    states = tmp_path / "kept/dev.states"
    states.write_bytes(states.read_bytes()[:-4])
    assert "dev.states is damaged; delete" in line()
    assert not (tmp_path / "new/config.json").exists()


# -- what cannot be kept --------------------------------------------------------------------------

REFUSED = {
    "dropout": (
        "prefix", UPPER | dict(backbone__dropout=0.1),
        "the backbone has dropout (dropout 0.1, attention_dropout 0.1), so its states differ in "
        "every step; set backbone.dropout=0, or set cache.location=''",
    ),
    "config_dropout": (
        "prefix", UPPER | dict(backbone__dropout=None), "(dropout 0.1, attention_dropout 0.1)",
    ),
    "soft": ("soft", {}, "the prompt is in the input or in layer 1"),
    "from_the_first": ("prefix", {}, "use a prefix in upper layers only (prompt.layers)"),
    "bias": ("bias_only", {}, "backbone/embed/norm/bias trains, and the cached states"),
    "limit": (
        "prefix", UPPER | dict(cache__limit=1e-6),
        "cache.limit=1e-06; raise the limit, set cache.dtype=bfloat16, or set cache.location=''",
    ),
    "where": ("prefix", UPPER | dict(cache__location="hots"), "cache.location='hots' is unknown"),
    "folder": ("prefix", UPPER | dict(cache__folder="x"), "needs cache.location=disk"),
    "dtype": ("prefix", UPPER | dict(cache__dtype="float16"), "cache.dtype='float16' is unknown"),
    "negative": ("prefix", UPPER | dict(cache__limit=0), "cache.limit=0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_one_line(case, folders, data, refused, tmp_path):
    method, fields, message = REFUSED[case]
    c = make_config(folders["bert"], data, method, **COMMON | dict(cache__location="host"))
    path = tmp_path / "c.json"
    path.write_text(c.to_json())
    edit(path, **{name.replace("__", "."): value for name, value in fields.items()})
    assert message in refused("train", f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run/config.json").exists()
