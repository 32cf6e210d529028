"""Compositions from a config to predictions: a frozen part beside one that trains, label rows."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, train_and_export

from jaxprompt.build.prompt_artifact import read_export


def composed(backbone, data, parts, **fields):
    """Fills a config with a composition; `head.name` and the template may be among the fields."""
    return make_config(backbone, data, "compose", arguments={"parts": parts}, **fields)


def predicts(workdir, data, tmp_path, capsys):
    """Tells which share of the test rows an export answers right, as `evaluate` does."""
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    right = np.mean([line["prediction"] == line["label"] for line in read_lines(out)])
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    assert right == pytest.approx(measured["accuracy"])
    return right


SHORT = {"train.total_steps": 40, "train.eval_steps": 20, "optim.lr": 0.05}


@pytest.mark.long
def test_a_shared_prefix_stays_and_soft_tokens_learn(backbone, data, tmp_path, capsys):
    """The prefix is that of an export, to the last bit; the export of both is plain constants."""
    shared = make_config(backbone, data, "prefix", **{"prompt.length": 3, "optim.lr": 0.1} | SHORT)
    (tmp_path / "shared").mkdir()
    _, first, _ = train_and_export(capsys, tmp_path / "shared", shared)
    parts = f"prefix(length=3,init='{first / 'export'}')+soft(length=2,start=labels)"
    c = composed(backbone, data, parts, trainable="prompt/soft/.*,head/.*", **SHORT)
    result, workdir, told = train_and_export(capsys, tmp_path, c)
    assert (
        f"prompt initialised from {first / 'export'}" in told
        and result["trained"] == 2 * 32 + 32 * 3 + 3
    )
    held, before = (load_file(own / "export/prompt.safetensors") for own in (workdir, first))
    for name in ("prompt/k", "prompt/v"):
        np.testing.assert_array_equal(held[name], before[name])
    assert held["prompt/slots"].shape == (2, 32)
    _, metadata = read_export(str(workdir / "export"))
    assert metadata.prompt.name == "constant" and metadata.method == "compose"
    assert metadata.init.path == str(first / "export")
    assert predicts(workdir, data, tmp_path, capsys) > 0.6
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}")
    assert code == 0, err
    rows = json.loads((workdir / "inspect" / "inspect.json").read_text())["rows"]
    assert [row["start"]["token"] for row in rows] == ["beast", "food"]
    assert jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[0] == 0
    c = make_config(backbone, data, "prefix", **{"prompt.length": 3, "train.total_steps": 1})
    (tmp_path / "again").mkdir()
    _, again, _ = train_and_export(capsys, tmp_path / "again", c)
    shutil.rmtree(first / "export")
    shutil.copytree(again / "export", first / "export")
    code, _, err = jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")
    assert code == 2 and "another export now; restore" in err


@pytest.mark.long
def test_soft_tokens_stand_before_those_of_dart(backbone, data, tmp_path, capsys):
    fields = {
        "head.name": "label_rows", "task.labels": "beast,food,tool", "data.max_len": 32,
        "task.template": "[soft*2] {text} [soft*2] [mask] .", "data.multiple": 8, "optim.lr": 1e-3,
        "trainable": "prompt/.*,head/.*,backbone/.*", "train.total_steps": 18,
        "train.eval_steps": 6,
    }  # fmt: skip
    parts = "soft(length=2,start=vocab)+dart(length=2,text='it was',fluency=0.5)"
    c = composed(backbone, data, parts, **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert result["trained"] == result["total"]
    held = load_file(workdir / "export/prompt.safetensors")
    assert held["prompt/slots"].shape == (4, 32) and held["prompt/rows"].shape == (3, 32)
    assert predicts(workdir, data, tmp_path, capsys) > 0.6


@pytest.mark.long
def test_a_grid_of_them_trains_as_one_program(backbone, data, tmp_path, capsys):
    c = composed(backbone, data, "prefix(length=2)+p_tuning(length=2,encoder=mlp)", **SHORT)
    c = c.replace({"runs.seeds": (0, 1)})
    (tmp_path / "c.json").write_text(c.to_json())
    workdir = tmp_path / "runs"
    code, _, err = jaxprompt(
        capsys, "train", f"--config={tmp_path / 'c.json'}", f"--workdir={workdir}"
    )
    assert code == 0, err
    for seed in (0, 1):
        own = workdir / f"seed={seed}"
        result = json.loads((own / "result.json").read_text())
        measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={own}", "--split=test")[1])
        assert measured["accuracy"] == pytest.approx(result["test"]["accuracy"])


@pytest.mark.long
def test_parts_of_a_t5(data, tmp_path, capsys):
    """In the input, in what the decoder is fed, and in its attention over the encoder."""
    folder = make_backbone(tmp_path / "t5", "t5")
    parts = "soft(length=2,decoder=1)+prefix(length=2,cross=2,decoder=1)"
    fields = {"head.name": "verbalizer", "task.template": "{text} about [mask] ."}
    c = composed(folder, data, parts, **fields)
    _, workdir, _ = train_and_export(capsys, tmp_path, c)
    names = {n for n in load_file(workdir / "export/prompt.safetensors") if "prompt/" in n}
    assert {"prompt/slots", "prompt/decoder_slots", "prompt/k", "prompt/cross_k"} <= names
    predicts(workdir, data, tmp_path, capsys)


@pytest.mark.parametrize(
    "parts, told",
    [
        ("soft(length=2", "cannot be read; use methods and their fields"),
        ("soft(length=2)+prefix(length=2,init='/no/where')", "cannot read /no/where/prompt.json"),
        ("soft(length=2,start=file,file='/no/where.npy')+prefix", "/no/where.npy"),
        ("soft(length=2,start=frequent)+prefix(length=2)", "corpus.path is empty"),
        (
            "soft(length=2,text='a cat')+prefix(length=2)",
            "'a cat' is only used with prompt.start=text",
        ),
    ],
)
def test_what_does_not_fit_is_named(parts, told, backbone, data, tmp_path, refused):
    (tmp_path / "c.json").write_text(composed(backbone, data, parts).to_json())
    line = refused(
        "train", f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'w'}", started=True
    )
    assert told in line


def test_parts_for_whose_slots_there_is_no_place_are_refused(backbone, data, tmp_path, refused):
    parts, layout = "soft(length=2)+ipt(length=2)", {"task.template": "[soft*2] {text}"}
    (tmp_path / "c.json").write_text(composed(backbone, data, parts, **layout).to_json())
    line = refused(
        "train", f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'w'}", started=True
    )
    assert "places 2 soft tokens, but the prompt has 4 slots" in line


def test_a_composition_starts_by_its_parts_alone(backbone, data, tmp_path, capsys, refused):
    c = composed(backbone, data, "soft(length=2)+prefix(length=2)", **{"train.total_steps": 1})
    _, workdir, _ = train_and_export(capsys, tmp_path, c)
    c = c.replace({"prompt.init": str(workdir / "export")})
    (tmp_path / "again.json").write_text(c.to_json())
    words = [f"--config={tmp_path / 'again.json'}", f"--workdir={tmp_path / 'again'}"]
    assert "set init= of each of prompt.parts" in refused("train", *words, started=True)


@pytest.mark.long
def test_a_part_of_another_length_is_cut_or_repeated(trained, backbone, data, tmp_path, capsys):
    """And it is said. What stands still is that to the last bit."""
    before = load_file(trained / "export/prompt.safetensors")
    for length, told in ((3, "cut to 3"), (6, "repeated to 6")):
        parts = f"soft(length=2)+prefix(length={length},init='{trained / 'export'}')"
        folder = tmp_path / str(length)
        folder.mkdir()
        c = composed(backbone, data, parts, trainable="prompt/soft/.*,head/.*")
        _, workdir, err = train_and_export(capsys, folder, c)
        assert f"prompt initialised from {trained / 'export'}, its 4 tokens {told}" in err
        held = load_file(workdir / "export/prompt.safetensors")
        for name in ("prompt/k", "prompt/v"):
            expected = np.concatenate([before[name]] * 2, axis=1)[:, :length]
            np.testing.assert_array_equal(held[name], expected)


@pytest.mark.long
def test_several_exports_are_averaged(backbone, data, tmp_path, capsys, refused):
    folders = []
    for seed in (0, 1):
        (tmp_path / f"s{seed}").mkdir()
        own = {"prompt.length": 3 + seed, "seed": seed}
        c = make_config(backbone, data, "soft", **SHORT | own)
        folders.append(train_and_export(capsys, tmp_path / f"s{seed}", c)[1] / "export")
    init = ",".join(map(str, folders))
    own = {"prompt.length": 4, "prompt.init": init, "trainable": "head/.*"}
    (tmp_path / "mean").mkdir()
    c = make_config(backbone, data, "soft", **own)
    _, workdir, err = train_and_export(capsys, tmp_path / "mean", c)
    assert f"prompt initialised from {folders[0]}, its 3 tokens repeated to 4" in err
    assert f"prompt initialised from {folders[1]}\n" in err
    first, second, held = (
        load_file(own / "prompt.safetensors")["prompt/slots"]
        for own in (*folders, workdir / "export")
    )
    np.testing.assert_allclose(held, (first[[0, 1, 2, 0]] + second) / 2, rtol=0, atol=1e-7)
    init = read_export(str(workdir / "export"))[1].init
    assert [init.path, *(origin.path for origin in init.more)] == [
        str(folder) for folder in folders
    ]
    # One whose name has a comma; what trains as a whole needs it no more once it is trained.
    named = shutil.copytree(folders[0], tmp_path / "lr=0.1,seed=0")
    c = make_config(
        backbone, data, "soft", trainable="prompt/.*,head/.*", prompt__length=3,
        prompt__init=str(named),
    )  # fmt: skip
    (tmp_path / "named").mkdir()
    _, workdir, err = train_and_export(capsys, tmp_path / "named", c)
    assert f"prompt initialised from {named}\n" in err
    shutil.rmtree(named)
    assert jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[0] == 0
    c = c.replace({"prompt.init": f"{init.path},/no/where"})
    (tmp_path / "c.json").write_text(c.to_json())
    line = refused(
        "train", f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'w'}", started=True
    )
    assert "cannot read /no/where/prompt.json" in line
