"""Instance-wise prompts from a config to predictions: from a topic classifier, beside others."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from spoil import edit, write_card
from tiny_run import (
    accuracy,
    compare_answers,
    jaxprompt,
    make_backbone,
    make_config,
    serve,
    split_scores,
    succeed,
)

from jaxprompt.__main__ import main
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.layers.word_rows import hash_vectors, unpack_ids
from jaxprompt.runs.train import train_prompt

SHORT = {"train.total_steps": 60, "train.eval_steps": 20, "optim.lr": 0.05, "prompt.scale": 0.1}
FEW = SHORT | {"train.total_steps": 3}
ENCODES = {"prompt.encoder": "cnn", "prompt.fixed": True, "prompt.hidden": 8}


@pytest.fixture
def run(backbone, data, capsys):
    """Trains, exports and answers in a folder."""

    def call(folder, **fields):
        folder.mkdir()
        config = make_config(backbone, data, "ipt", **SHORT | fields)
        return serve(capsys, folder, config, data / "test.jsonl")

    return call


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
def test_a_topic_classifier_learns_without_its_backbone(topics, data, capsys):
    assert accuracy(compare_answers(capsys, topics, data / "test.jsonl")) > 0.7
    record = json.loads((topics / "record.json").read_text())
    tensors, metadata = read_export(str(topics / "export"))
    assert metadata.prompt.get("seen") == record["seen"] and metadata.prompt.name == "ipt"
    # Of some 150 words those of the training text have rows.
    assert tensors["prompt/words/table"].shape == (len(unpack_ids(record["seen"])), 32)


@pytest.mark.long
@pytest.mark.parametrize("fields", [{}, {"prompt.on": "prefix"}], ids=["slots", "prefix"])
def test_inspect_compares_the_words_of_a_text_with_its_prompt(
    fields, backbone, data, tmp_path, capsys
):
    workdir = tmp_path / "run"
    train_prompt(make_config(backbone, data, "ipt", **FEW | fields), str(workdir))
    out, _ = succeed(capsys, "inspect", f"--workdir={workdir}", "--instances=2")
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
    assert jaxprompt(capsys, "export", f"--workdir={workdir}")[0] == 0
    check_cosines(backbone, workdir, instances[0])


def check_cosines(backbone, workdir, case):
    """Compares the rows of a text's first words with its embeddings."""
    table = load_file(workdir / "export/prompt.safetensors")["prompt/words/table"]
    trained_ids = unpack_ids(json.loads((workdir / "record.json").read_text())["seen"]).tolist()
    words = load_file(backbone / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    vocab = (backbone / "vocab.txt").read_text("utf-8").splitlines()
    ids = [vocab.index(token) for token in case["tokens"]]
    rows = np.stack(
        [
            table[trained_ids.index(i)] if i in trained_ids else hash_vectors(i, 32, 0.1, np)
            for i in ids[:4]
        ]
    )
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    cosines = (unit(words[ids]) @ unit(rows).T).max(1)
    np.testing.assert_allclose(case["cosines"], cosines, atol=1e-5)
    assert case["nearest"] == sorted(np.argsort(-cosines, kind="stable")[:5].tolist())


@pytest.mark.long
@pytest.mark.parametrize("fields", [{}, ENCODES], ids=["rows", "encoder"])
def test_a_prompt_starts_from_a_topic_classifier(fields, run, topics, tmp_path, capsys, refused):
    """Its rows stay where they are: the export names the other, and holds what it trained."""
    changes = fields | {"prompt.pretrained": str(topics / "export"), "optim.lr": 1e-6}
    _, workdir, rows, log = run(tmp_path / "a", **changes)
    assert f"prompt initialised from {topics / 'export'}\n" in log
    before, after = (load_file(f / "export/prompt.safetensors") for f in (topics, workdir))
    record = json.loads((workdir / "record.json").read_text())
    num_seen = len(unpack_ids(record["seen"])) if "seen" in record else 0
    for name in [n for n in after if n.startswith("prompt/")]:
        part = slice(num_seen) if name.endswith("table") else slice(None)  # those of words
        np.testing.assert_allclose(after[name][part], before[name][part], atol=1e-3)
    assert fields or num_seen > 40
    assert "prompt/words/base" not in after
    assert ("prompt/words/table" in after) == (not fields)
    # Another export in its place is refused; where it moved can be said.
    copy = shutil.copytree(topics / "export", tmp_path / "copy")
    path = workdir / "export" / "prompt.json"
    moved = path.read_text().replace(str(topics / "export"), str(tmp_path / "gone"))
    write_card(path, json.loads(moved))
    words = ["predict", f"--workdir={workdir}", "--text=cat"]
    line = refused(*words)
    assert "gone" in line and "give its path as pretrained" in line
    assert jaxprompt(capsys, *words, f"--pretrained={copy}")[0] == 0
    assert "another export now" in refused(*words, f"--pretrained={workdir / 'export'}")


@pytest.mark.long
def test_what_it_depends_on_is_that_of_training_at_every_remove(
    topics, run, data, tmp_path, capsys, refused
):
    """C starts from A, which starts from topics; these are exported again, with other numbers.

    And rows that another export holds never train, whatever the patterns say.
    """
    first = shutil.copytree(topics / "export", tmp_path / "topics")
    a = run(tmp_path / "a", **{"prompt.pretrained": str(first)}).workdir
    changes = {"prompt.pretrained": str(a / "export"), "trainable": "prompt/.*,head/.*"}
    _, config, _, log = run(tmp_path / "c", **changes)
    assert "prompt/words/base" not in log
    assert "prompt/words/base" not in load_file(config / "export/prompt.safetensors")
    # The same numbers exported again are the same export.
    edit(first / "prompt.json", created="1970-01-01")
    for workdir in (a, config):
        compare_answers(capsys, workdir, data / "test.jsonl")
    shutil.rmtree(first)
    shutil.copytree(a / "export", first)
    for words in (
        ("predict", f"--workdir={config}", "--text=cat"),
        ("evaluate", f"--workdir={config}"),
    ):
        assert "which contains another export now" in refused(*words)
    words = ("predict", f"--workdir={topics}", "--text=cat", f"--pretrained={first}")
    assert "depends on no other export; leave out pretrained=" in refused(*words)


@pytest.mark.long
def test_a_grid_and_a_mesh_train_as_alone(backbone, data, tmp_path, capsys):
    """The rows lie on two devices each half, and examples on four."""
    alone = make_config(backbone, data, "ipt", **FEW, seed=1)
    grid = alone.replace({"runs.seeds": (0, 1)})
    (tmp_path / "c.json").write_text(grid.to_json())
    words = [f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'runs'}"]
    succeed(capsys, "train", *words)
    train_prompt(alone, str(tmp_path / "alone"))
    scores = split_scores(alone, tmp_path / "alone")
    np.testing.assert_allclose(split_scores(alone, tmp_path / "runs/seed=1"), scores, atol=1e-3)
    spread = alone.replace({"mesh.data": 4, "mesh.model": 2})
    train_prompt(spread, str(tmp_path / "spread"))
    np.testing.assert_allclose(split_scores(spread, tmp_path / "spread"), scores, atol=1e-5)


COMPOSED = {
    "beside": ("bert", "prefix(length=2)+ipt(length=3,scale=0.1)+p_tuning(length=2,encoder='mlp')"),
    "folded": ("bert", "prefix(length=2,hidden=4)+ipt(length=3,on=prefix,scale=0.1)"),
    # It shifts nothing, where the prefix of the texts does.
    "cross": ("t5", "ipt(length=3,scale=0.1)+prefix(length=4)+prefix(length=0,cross=4,hidden=8)"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMPOSED)
def test_beside_prompts_of_the_task(name, backbone, data, tmp_path, capsys):
    """What does not read the text is folded where that spares work: P-tuning's encoder is gone."""
    family, parts = COMPOSED[name]
    folder = backbone if family == "bert" else make_backbone(tmp_path / family, family)
    fields = {n: x for n, x in FEW.items() if n != "prompt.scale"}
    config = make_config(folder, data, "compose", arguments={"parts": parts}, **fields)
    run = serve(capsys, tmp_path, config, data / "test.jsonl")
    tensors, metadata = read_export(str(run.workdir / "export"))
    assert metadata.prompt.name == "compose" and metadata.prompt.get("seen")
    shapes = {part: x.shape for part, x in tensors.items() if part.startswith("prompt/")}
    if name == "beside":
        assert shapes == {
            "prompt/prefix/table": (2, 2, 2, 2, 16), "prompt/ipt/words/table": (54, 32),
            "prompt/constant/slots": (2, 32),
        }  # fmt: skip
    else:
        assert f"prompt/constant/{'k' if name == 'folded' else 'cross_k'}" in shapes


LAST = {"task.template": "{text} [soft]"}
TOPICS = {"head.name": "topics"}
REFUSED = [
    ("ipt", "bert", {"prompt.length": 30}, "30 slots, over max_len 24"),
    ("ipt", "bert", {"prompt.length": 60, "prompt.on": "prefix"}, "60 positions of the prompt"),
    ("ipt", "bert", {"prompt.pretrained": "/no/where"}, "/no/where/prompt.json cannot be read"),
    ("ipt", "bert", {"prompt.pretrained": "EXPORT"}, "contains a prompt of method prefix"),
    ("ipt", "bert", {"prompt.pretrained": "a,b"}, "pretrained=a,b names 2 exports"),
    ("ipt", "bert", {"prompt.init": "/no/where"}, "is initialised from an export with prompt.pre"),
    ("ipt", "bert", {"prompt.fixed": True}, "prompt.fixed=True needs an encoder"),
    ("ipt", "bert", {"task.template": "[soft*2] {text}"}, "but the prompt has 4"),
    ("ipt", "bert", TOPICS | {"task.labels": "food"}, "task.labels=food must be 2 or more"),
    ("soft", "bert", TOPICS, "use prompt.name=ipt"),
    # A short text lacks the last of the soft tokens, where a left-to-right model reads.
    ("ipt", "gpt2", LAST, "ends in [soft], where this backbone predicts"),
]


@pytest.mark.parametrize("method, family, fields, message", REFUSED)
def test_what_does_not_fit_is_named(
    method, family, fields, message, trained, backbone, data, tmp_path, refused_config
):
    if fields.get("prompt.pretrained") == "EXPORT":
        fields = {"prompt.pretrained": str(trained / "export")}
    folder = backbone if family == "bert" else make_backbone(tmp_path / family, family)
    short = {k: v for k, v in SHORT.items() if method == "ipt" or k != "prompt.scale"}
    config = make_config(folder, data, method, **short | fields)
    assert message in refused_config(config, "train")
    if fields is LAST:
        (tmp_path / "c.json").write_text(
            config.replace({"task.template": "{text} [soft] it"}).to_json()
        )
        assert main(["validate", f"--config={tmp_path / 'c.json'}"]) == 0
