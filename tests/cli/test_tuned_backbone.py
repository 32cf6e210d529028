"""What a run changed of its backbone ships as differences, or as a folder of its own."""

import json

import jax
import numpy as np
import pytest
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, succeed

import jaxprompt as jp
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.build.tuned_backbone import from_delta, to_delta
from jaxprompt.errors import InputError
from jaxprompt.tree import flatten

MASKED = {
    "head.name": "verbalizer", "task.words": "beast,food,tool",
    "task.template": "{text} about [mask] .", "backbone.dropout": 0,
}  # fmt: skip


ROWS = 131  # of the vocabulary: no mesh divides them


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, data):
    """A finished run that tuned a whole BERT, its folder and its flags, and what it predicts."""
    root = tmp_path_factory.mktemp("tuned")
    folder = make_backbone(root / "bert", vocab_size=ROWS)
    config = make_config(folder, data, "full", **MASKED, optim__lr=1e-2, data__max_len=24)
    (root / "config.json").write_text(config.to_json())
    return folder, root, [f"--config={root / 'config.json'}", f"--workdir={root / 'run'}"]


@pytest.fixture(scope="module")
def whole(tuned):
    """The export of that run as tensors, and its card."""
    from jaxprompt.__main__ import main

    _, root, command = tuned
    assert main(["train", *command]) == 0
    assert main(["export", *command, f"--output={root / 'whole'}"]) == 0
    return read_export(str(root / "whole"))


def predict(capsys, prompt, data, out, *words):
    argv = [f"--prompt={prompt}", f"--input={data / 'test.jsonl'}", f"--output={out}", *words]
    succeed(capsys, "predict", *argv)
    return np.array([list(line["scores"].values()) for line in read_lines(out)])


def test_differences_predict_as_the_weights_do(tuned, whole, data, tmp_path, capsys):
    tensors, _ = whole
    _, root, command = tuned
    out, err = succeed(capsys, "export", *command, f"--output={tmp_path / 'd'}", "--delta")
    exported, _ = read_export(str(tmp_path / "d"))
    names = {name for name in tensors if name.startswith("backbone/")}
    assert names and not names & exported.keys()
    assert all(exported[f"delta/{name}"].dtype == np.float16 for name in names)
    # A word that stands in no text keeps its row, which is left out.
    moved = {
        name: len(exported[f"delta_rows/{name}"])
        for name in names
        if f"delta_rows/{name}" in exported
    }
    assert any(0 < count == len(exported[f"delta/{name}"]) for name, count in moved.items())
    sizes = list(json.loads(out).values())
    assert sizes[0] < 0.6 * (root / "whole" / "prompt.safetensors").stat().st_size
    before = sum(tensors[name].nbytes for name in names)
    assert f"tuned weights: {before:,} bytes, as differences " in err
    actual, wanted = (
        predict(capsys, x, data, tmp_path / "out.jsonl") for x in (tmp_path / "d", root / "whole")
    )
    np.testing.assert_allclose(actual, wanted, atol=2e-4)
    assert np.abs(actual - wanted).max() > 0  # or nothing was rounded


def test_the_tuned_folder_is_a_model(tuned, whole, data, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    _, root, command = tuned
    tensors, _ = whole
    place = tmp_path / "model"
    words = [f"--tuned={place}", f"--output={tmp_path / 'prompt'}"]
    for _ in range(2):  # the folder of the same run is replaced
        _, err = succeed(capsys, "export", *command, *words)
        assert f"the prompt needs the backbone {place}" in err
    exported, metadata = read_export(str(tmp_path / "prompt"))
    assert not any("backbone/" in name for name in exported)
    assert metadata.backbone.id == str(place)
    actual, wanted = (
        predict(capsys, x, data, tmp_path / "out.jsonl")
        for x in (tmp_path / "prompt", root / "whole")
    )
    np.testing.assert_allclose(actual, wanted, atol=1e-6)

    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    model = transformers.AutoModelForMaskedLM.from_pretrained(place).eval()
    label_words = tokenizer.convert_tokens_to_ids(["beast", "food", "tool"])
    rows = read_lines(data / "test.jsonl")
    for row, ours in zip(rows[:3], actual, strict=False):
        ids = tokenizer(f"{row['text']} about [MASK] .", return_tensors="pt")
        with torch.no_grad():
            logits = model(**ids).logits[ids["input_ids"] == tokenizer.mask_token_id][0]
        np.testing.assert_allclose(ours, logits[label_words].softmax(-1), atol=1e-5)
    assert "tuned with jaxprompt" in (place / "README.md").read_text()


@pytest.mark.long
def test_tuned_weights_fit_every_mesh(tuned, whole, data, tmp_path, capsys):
    """Where the model axis does not divide the vocabulary its tables are filled up."""
    folder, root, command = tuned
    assert jaxprompt(capsys, "export", *command, f"--output={tmp_path / 'd'}", "--delta")[0] == 0
    spread = jp.load_backbone(str(folder), mesh=(1, 2))
    table = flatten({"backbone": spread.loaded.params})["backbone/embed/word/table"]
    assert len(table) == ROWS + 1
    alone = jp.load_backbone(str(folder))
    texts = [row["text"] for row in read_lines(data / "test.jsonl")][:6]
    scores = lambda backbone, prompt: np.array([
        list(row["scores"].values()) for row in jp.predict(jp.attach(backbone, prompt), texts)
    ])  # fmt: skip
    for place in (root / "whole", tmp_path / "d"):
        prompt = jp.load_prompt(str(place))
        np.testing.assert_allclose(scores(spread, prompt), scores(alone, prompt), atol=1e-5)
    prompt = jp.load_prompt(str(root / "whole"))
    jp.save_prompt(prompt, str(tmp_path / "again"), "delta", backbone=spread)
    exported, again = (read_export(str(tmp_path / name))[0] for name in ("d", "again"))
    assert exported.keys() == again.keys()
    assert all((exported[name] == again[name]).all() for name in exported)
    message = (
        "format='delta': the prompt already contains differences; save it without format='delta'"
    )
    with pytest.raises(InputError, match=message):
        jp.save_prompt(jp.load_prompt(str(tmp_path / "d")), str(tmp_path / "x"), "delta")


@pytest.mark.long
def test_what_was_not_tuned_is_refused(run, refused, tuned, whole, tmp_path):
    argv = [f"--config={run / 'config.json'}", f"--workdir={run}"]
    for words in (["--delta"], [f"--tuned={tmp_path / 'm'}"]):
        flag = words[0].partition("=")[0]
        line = refused("export", *argv, *words)
        assert line == f"{flag}: the run did not tune the backbone; export without it"
    line = refused("export", *argv, "--delta", f"--tuned={tmp_path / 'm'}")
    assert line == "--delta and --tuned both export the tuned weights; give one of them"
    _, _, command = tuned
    line = refused("export", *command, f"--peft={tmp_path / 'peft'}")
    assert line.startswith("--peft: the run tuned weights of the backbone")
    assert not (tmp_path / "m").exists() and not (tmp_path / "peft").exists()


def test_differences_give_the_weights_back_in_their_dtype(tuned, whole):
    folder, _, _ = tuned
    backbone, tensors = jp.load_backbone(folder), whole[0]
    base = flatten({"backbone": backbone.loaded.params})
    delta = to_delta(tensors, backbone, "--delta").tensors
    back = from_delta("p", delta, base, 0)
    assert back.keys() == tensors.keys()
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape, back, dict(tensors)))
    rounded = flatten({"backbone": jp.load_backbone(folder, dtype="bfloat16").loaded.params})
    with pytest.raises(InputError, match="p contains differences .*bfloat16; load it with"):
        from_delta("p", delta, rounded, 0)
