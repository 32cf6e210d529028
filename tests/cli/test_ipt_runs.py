"""Instance-wise prompts from a config to predictions: alone, from a topic classifier, on a mesh."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from spoil import edit, write_card
from tiny_run import (
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    split_scores,
    train_and_export,
)

from jaxprompt.__main__ import main
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.layers.word_rows import hash_vectors, unpack_ids

SHORT = {"train.total_steps": 60, "train.eval_steps": 20, "optim.lr": 0.05, "prompt.scale": 0.1}
ENCODES = {"prompt.encoder": "cnn", "prompt.fixed": True, "prompt.hidden": 8}


def predicts(workdir, data, tmp_path, capsys, *words):
    """Tells which share of the test rows an export answers right."""
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}", *words]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    return np.mean([line["prediction"] == line["label"] for line in read_lines(out)])


def evaluates(workdir, capsys):
    code, out, err = jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")
    assert code == 0, err
    return json.loads(out)["accuracy"]


def run(backbone, data, folder, capsys, **fields):
    folder.mkdir()
    c = make_config(backbone, data, "ipt", **SHORT | fields)
    return train_and_export(capsys, folder, c)


@pytest.fixture(scope="module")
def topics(backbone, data, tmp_path_factory):
    """A topic classifier: rows of words and convolutions, without the backbone."""
    folder = tmp_path_factory.mktemp("topics")
    fields = ENCODES | {"prompt.fixed": False, "head.name": "topics"}
    config, workdir = folder / "c.json", folder / "r"
    config.write_text(make_config(backbone, data, "ipt", **SHORT | fields).to_json())
    assert main(["pretrain", f"--config={config}", f"--workdir={workdir}"]) == 0
    assert main(["export", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.mark.long
def test_a_topic_classifier_learns_without_its_backbone(topics, data, tmp_path, capsys):
    assert predicts(topics, data, tmp_path, capsys) > 0.7
    record = json.loads((topics / "record.json").read_text())
    held, (_, metadata) = (
        load_file(topics / "export/prompt.safetensors"),
        read_export(str(topics / "export")),
    )
    assert metadata.prompt.get("seen") == record["seen"] and metadata.prompt.name == "ipt"
    # Of some 150 words those of the training text have rows.
    assert held["prompt/words/table"].shape == (len(unpack_ids(record["seen"])), 32)


@pytest.mark.default_cases("slots")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt.on": "prefix"},
        {"prompt.on": "prefix", "prompt.added": False, "prompt.layers": "1-2", **ENCODES},
    ],
    ids=["slots", "prefix", "encoded_prefix"],
)
def test_learns_exports_and_predicts(fields, backbone, data, tmp_path, capsys):
    result, workdir, _ = run(backbone, data, tmp_path / "a", capsys, **fields)
    expected = pytest.approx(result["test"]["accuracy"])
    assert predicts(workdir, data, tmp_path, capsys) == expected == evaluates(workdir, capsys)
    assert result["test"]["accuracy"] > 0.6
    words = [f"--workdir={workdir}", "--text=", "--text=the cat"]
    code, out, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    empty, cat = map(json.loads, out.splitlines())  # an empty text has no prompt
    assert np.isfinite(empty["score"]) and empty["scores"] != cat["scores"]
    if "prompt.encoder" in fields:
        return
    code, out, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}", "--instances=2")
    assert code == 0, err
    instances = json.loads((workdir / "inspect/inspect.json").read_text())["instances"]
    page = (workdir / "inspect/inspect.html").read_text()
    for name in ("embeddings-pca", "prompts-pca", "prompts-tsne"):
        assert (workdir / f"inspect/{name}.png").stat().st_size > 5_000
    if fields:
        assert instances == [] and "cannot be compared with words" in page
        return
    assert len(instances) == 2
    for case in instances:
        marked = [case["tokens"][place] for place in case["nearest"]]
        assert len(marked) == min(5, len(case["tokens"]))
        assert f"[{marked[0]}]" in out and f"<mark>{marked[0]}</mark>" in page
    check_cosines(backbone, workdir, instances[0])


def check_cosines(backbone, workdir, case):
    """Compares the rows of a text's first words with its embeddings."""
    table = load_file(workdir / "export/prompt.safetensors")["prompt/words/table"]
    seen = unpack_ids(json.loads((workdir / "record.json").read_text())["seen"]).tolist()
    words = load_file(backbone / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    vocab = (backbone / "vocab.txt").read_text("utf-8").splitlines()
    ids = [vocab.index(token) for token in case["tokens"]]
    rows = np.stack([
        table[seen.index(i)] if i in seen else hash_vectors(i, 32, 0.1, np) for i in ids[:4]
    ])  # fmt: skip
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    cosines = (unit(words[ids]) @ unit(rows).T).max(1)
    np.testing.assert_allclose(case["cosines"], cosines, atol=1e-5)
    assert case["nearest"] == sorted(np.argsort(-cosines, kind="stable")[:5].tolist())


@pytest.mark.long
@pytest.mark.parametrize("fields", [{}, ENCODES], ids=["rows", "encoder"])
def test_a_prompt_starts_from_a_topic_classifier(fields, topics, backbone, data, tmp_path, capsys):
    """Its rows stay where they are: the export names the other, and holds what it trained."""
    own = fields | {"prompt.pretrained": str(topics / "export")}
    _, workdir, told = run(backbone, data, tmp_path / "a", capsys, **own, **{"optim.lr": 1e-6})
    assert f"prompt initialised from {topics / 'export'}\n" in told
    first, held = (load_file(f / "export/prompt.safetensors") for f in (topics, workdir))
    record = json.loads((workdir / "record.json").read_text())
    seen = len(unpack_ids(record["seen"])) if "seen" in record else 0
    for name in [n for n in held if n.startswith("prompt/")]:
        rows = slice(seen) if name.endswith("table") else slice(None)  # those of words
        np.testing.assert_allclose(held[name][rows], first[name][rows], atol=1e-3)
    assert fields or seen > 40
    assert "prompt/words/base" not in held
    assert ("prompt/words/table" in held) == (not fields)
    right = predicts(workdir, data, tmp_path, capsys)
    assert right == pytest.approx(evaluates(workdir, capsys))
    # Another export in its place is refused; where it moved can be said.
    copy = tmp_path / "copy"
    shutil.copytree(topics / "export", copy)
    path = workdir / "export" / "prompt.json"
    card = json.loads(path.read_text())
    moved = path.read_text().replace(str(topics / "export"), str(tmp_path / "gone"))
    write_card(path, json.loads(moved))
    words = [f"--workdir={workdir}", "--text=cat"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 2 and "gone" in err and "give its path as pretrained" in err
    assert predicts(workdir, data, tmp_path, capsys, f"--pretrained={copy}") == right
    other = json.loads((copy / "prompt.json").read_text())
    assert other["sha256"] == card["init"]["sha256"]
    code, _, err = jaxprompt(capsys, "predict", *words, f"--pretrained={workdir / 'export'}")
    assert code == 2 and "another export now" in err


@pytest.mark.long
def test_a_grid_trains_as_alone(backbone, data, tmp_path, capsys):
    c = make_config(backbone, data, "ipt", **SHORT)
    c = c.replace({"runs.seeds": (0, 1)})
    (tmp_path / "c.json").write_text(c.to_json())
    workdir = tmp_path / "runs"
    words = [f"--config={tmp_path / 'c.json'}", f"--workdir={workdir}"]
    code, _, err = jaxprompt(capsys, "train", *words)
    assert code == 0, err
    result, _, _ = run(backbone, data, tmp_path / "alone", capsys, seed=1)
    together = json.loads((workdir / "seed=1" / "result.json").read_text())
    assert together["test"]["accuracy"] == pytest.approx(result["test"]["accuracy"])
    assert evaluates(workdir / "seed=1", capsys) == pytest.approx(result["test"]["accuracy"])


@pytest.mark.long
def test_a_mesh_changes_nothing(backbone, data, tmp_path, capsys):
    """The rows lie on two devices each half, and examples on four."""
    scores, short = [], SHORT | {"train.total_steps": 3}
    for number, mesh in enumerate([{}, {"mesh.data": 4, "mesh.model": 2}]):
        c = make_config(backbone, data, "ipt", **short | mesh)
        (tmp_path / str(number)).mkdir()
        _, workdir, _ = train_and_export(capsys, tmp_path / str(number), c)
        scores.append(split_scores(c, workdir))
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


@pytest.mark.long
def test_beside_prompts_of_the_task(backbone, data, tmp_path, capsys):
    """What does not read the text is folded where that spares work: P-tuning's encoder is gone."""
    parts = "prefix(length=2)+ipt(length=3,scale=0.1)+p_tuning(length=2,encoder='mlp')"
    own = {k: v for k, v in SHORT.items() if k != "prompt.scale"}
    c = make_config(backbone, data, "compose", arguments={"parts": parts}, **own)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    _, metadata = read_export(str(workdir / "export"))
    assert metadata.prompt.name == "compose" and metadata.prompt.get("seen")
    held = load_file(workdir / "export/prompt.safetensors")
    shapes = {name: x.shape for name, x in held.items() if name.startswith("prompt/")}
    assert shapes == {
        "prompt/prefix/table": (2, 2, 2, 2, 16), "prompt/ipt/words/table": (54, 32),
        "prompt/constant/slots": (2, 32),
    }  # fmt: skip
    right = predicts(workdir, data, tmp_path, capsys)
    assert right == pytest.approx(result["test"]["accuracy"]) and right > 0.6


@pytest.mark.long
@pytest.mark.parametrize(
    "family, parts, name",
    [
        ("bert", "prefix(length=2,hidden=4)+ipt(length=3,on=prefix,scale=0.1)", "k"),
        # It shifts nothing, where the prefix of the texts does.
        ("t5", "ipt(length=3,scale=0.1)+prefix(length=4)+prefix(length=0,cross=4,hidden=8)",
         "cross_k"),
    ],
)  # fmt: skip
def test_a_folded_prefix_is_read_back(family, parts, name, backbone, data, tmp_path, capsys):
    fields = {k: v for k, v in SHORT.items() if k != "prompt.scale"} | {"train.total_steps": 4}
    model = backbone if family == "bert" else make_backbone(tmp_path / family, family)
    c = make_config(model, data, "compose", arguments={"parts": parts}, **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert f"prompt/constant/{name}" in load_file(workdir / "export/prompt.safetensors")
    right = predicts(workdir, data, tmp_path, capsys)
    assert right == pytest.approx(result["test"]["accuracy"])


LAST = {"task.template": "{text} [soft]"}
TOPICS = {"head.name": "topics"}
REFUSED = [
    ("ipt", "bert", {"prompt.length": 30}, "raise max_len to 33 or more"),
    ("ipt", "bert", {"prompt.length": 60, "prompt.on": "prefix"}, "60 positions of the prompt"),
    ("ipt", "bert", {"prompt.pretrained": "/no/where"}, "cannot read /no/where/prompt.json"),
    ("ipt", "bert", {"prompt.pretrained": "EXPORT"}, "contains a prompt of method prefix"),
    ("ipt", "bert", {"prompt.pretrained": "a,b"}, "pretrained=a,b names 2 exports"),
    ("ipt", "bert", {"prompt.init": "/no/where"}, "is initialised from an export with prompt.pre"),
    ("ipt", "bert", {"prompt.fixed": True}, "prompt.fixed=True needs an encoder"),
    ("ipt", "bert", {"task.template": "[soft*2] {text}"}, "but the prompt has 4"),
    ("ipt", "bert", TOPICS | {"task.labels": "food"}, "a task needs 2 or more"),
    ("soft", "bert", TOPICS, "use prompt.name=ipt"),
    # A short text lacks the last of the soft tokens, where a left-to-right model reads.
    ("ipt", "gpt2", LAST, "ends in [soft], where this backbone predicts"),
]


@pytest.mark.parametrize("method, family, fields, message", REFUSED)
def test_what_does_not_fit_is_named(
    method, family, fields, message, trained, backbone, data, tmp_path, refused
):
    if fields.get("prompt.pretrained") == "EXPORT":
        fields = {"prompt.pretrained": str(trained / "export")}
    folder = backbone if family == "bert" else make_backbone(tmp_path / family, family)
    short = {k: v for k, v in SHORT.items() if method == "ipt" or k != "prompt.scale"}
    c = make_config(folder, data, method, **short | fields)
    (tmp_path / "c.json").write_text(c.to_json())
    words = [f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'w'}"]
    assert message in refused("train", *words, started=True)
    if fields is LAST:
        c = c.replace({"task.template": "{text} [soft] it"})
        (tmp_path / "c.json").write_text(c.to_json())
        assert main(["validate", words[0]]) == 0


@pytest.mark.long
def test_what_it_depends_on_is_that_of_training_at_every_remove(
    topics, backbone, data, tmp_path, capsys, refused
):
    """C starts from A, which starts from topics; these are exported again, with other numbers.

    And rows that another export holds never train, whatever the patterns say.
    """
    first = shutil.copytree(topics / "export", tmp_path / "topics")
    _, a, _ = run(backbone, data, tmp_path / "a", capsys, **{"prompt.pretrained": str(first)})
    own = {"prompt.pretrained": str(a / "export"), "trainable": "prompt/.*,head/.*"}
    _, c, told = run(backbone, data, tmp_path / "c", capsys, **own)
    assert "prompt/words/base" not in told
    assert "prompt/words/base" not in load_file(c / "export/prompt.safetensors")
    right = predicts(c, data, tmp_path, capsys)
    assert right == pytest.approx(evaluates(c, capsys))
    # The same numbers exported again are the same export.
    edit(first / "prompt.json", created="1970-01-01")
    assert predicts(c, data, tmp_path, capsys) == right == pytest.approx(evaluates(c, capsys))
    assert predicts(a, data, tmp_path, capsys) == pytest.approx(evaluates(a, capsys))
    shutil.rmtree(first)
    shutil.copytree(a / "export", first)
    for words in ("predict", f"--workdir={c}", "--text=cat"), ("evaluate", f"--workdir={c}"):
        assert "which contains another export now" in refused(*words)
    words = ("predict", f"--workdir={topics}", "--text=cat", f"--pretrained={first}")
    assert "depends on no other export; leave out pretrained=" in refused(*words)
