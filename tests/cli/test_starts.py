"""Prompts that start from words, of a corpus or of a given text: alone and in a grid."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import jaxprompt, make_backbone, make_config, train_and_export

from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.examples import read_examples
from jaxprompt.build.initial_params import start
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import open_fitting, scorer_from_config
from jaxprompt.cli.grid import train_grid
from jaxprompt.convert.load import load_backbone
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.models.text_keys import text_keys
from jaxprompt.runs.train import train_prompt

COMMON = ["cat", "bread", "saw"]  # of the corpus; no training example repeats them so


@pytest.mark.long
def test_frequent_words_are_those_of_the_corpus(backbone, data, tmp_path, capsys):
    text = " ".join(word for i, word in enumerate(COMMON) for _ in range(20 - i))
    (tmp_path / "corpus.txt").write_text(f"{text} the old lion near a red vice\n")
    fields = dict(
        prompt__start="frequent", prompt__top=3, prompt__length=3, optim__lr=0,
        optim__lr_head=1e-2, corpus__path=tmp_path / "corpus.txt", corpus__processes=1,
        train__total_steps=1, train__eval_steps=1, train__test=False, backbone__dropout=0,
    )  # fmt: skip
    train_prompt(make_config(backbone, data, "soft", **fields), str(tmp_path / "alone"))
    grid = make_config(backbone, data, "soft", **fields, runs__seeds="(0, 1)")
    assert train_grid(grid, str(tmp_path / "grid")) == 0
    (tmp_path / "corpus.txt").unlink()  # what is learned needs it no more
    shutil.rmtree(tmp_path / "alone/corpus")
    ids = load_tokenizer(backbone).convert_tokens_to_ids(COMMON)
    (table,) = (
        x for name, x in load_file(backbone / "model.safetensors").items()
        if name.endswith("embeddings.word_embeddings.weight")
    )  # fmt: skip
    expected = {table[i].tobytes() for i in ids}
    for folder in ("alone", "grid/seed=0", "grid/seed=1"):
        place = tmp_path / folder
        words = (f"--config={place / 'config.json'}", f"--workdir={place}", f"--npy={place}.npy")
        assert jaxprompt(capsys, "export", *words)[0] == 0
        assert {row.tobytes() for row in np.load(f"{place}.npy")} == expected


@pytest.mark.long
def test_a_prefix_starts_from_what_the_model_gives_a_text(backbone, data, tmp_path, capsys):
    text = "cat bread saw lion red"
    fields = dict(
        prompt__start="text", prompt__text=text, prompt__length=4, prompt__layers="2-2",
        optim__lr=0, optim__lr_head=1e-2, train__total_steps=1, train__eval_steps=1,
        train__test=False, backbone__dropout=0,
    )  # fmt: skip
    train_prompt(
        make_config(backbone, data, "prefix", **fields, mesh__model=2), str(tmp_path / "alone")
    )
    grid = make_config(backbone, data, "prefix", **fields, runs__seeds="(0, 1)")
    assert train_grid(grid, str(tmp_path / "grid")) == 0
    c = make_config(backbone, data)
    opened = open_backbone(c.backbone)
    loaded = load_backbone(backbone, opened.family, opened.hf).params
    ids = np.array(encode_texts(load_tokenizer(backbone), [text])[0][:4])
    k, v = text_keys(opened.module, loaded, ids)["encoder"]
    for folder in ("alone", "grid/seed=0", "grid/seed=1"):
        place = tmp_path / folder
        assert jaxprompt(capsys, "export", f"--workdir={place}")[0] == 0
        tensors = load_file(place / "export/prompt.safetensors")
        for name, expected in (("k", k), ("v", v)):
            np.testing.assert_allclose(tensors[f"prompt/{name}"], expected[1:2], atol=1e-5)


@pytest.mark.long
def test_rows_that_an_lstm_computed_start_plain_ones(backbone, data, tmp_path, capsys, refused):
    """An export of P-tuning holds rows: they go on without an encoder, and never through one."""
    first = make_config(backbone, data, "p_tuning", prompt__encoder="mlp", optim__lr=1e-2)
    _, workdir, _ = train_and_export(capsys, tmp_path, first)
    fields = {"prompt__init": str(workdir / "export"), "optim__lr": 0.0, "prompt__encoder": "none"}
    (tmp_path / "next").mkdir()
    c = make_config(backbone, data, "p_tuning", **fields)
    _, after, _ = train_and_export(capsys, tmp_path / "next", c)
    rows = [load_file(own / "export/prompt.safetensors") for own in (workdir, after)]
    np.testing.assert_array_equal(rows[0]["prompt/slots"], rows[1]["prompt/slots"])
    config = tmp_path / "again.json"
    c = c.replace({"prompt.encoder": "mlp"})
    config.write_text(c.to_json())
    line = refused("train", f"--config={config}", f"--workdir={tmp_path / 'again'}", started=True)
    assert (
        "from other parameters than those in an export" in line
        and "set prompt.encoder=none" in line
    )


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"prompt__init": ""}, "initialises the head from the export in prompt.init, which "
                               "names 0; name one"),
        ({"prompt__init": "{0},{0}"}, "names 2; name one"),
        ({"head__name": "verbalizer", "task__template": "{text} it is [mask] ."},
         "prompt.init={0} has head.name=linear and this run verbalizer; use another export"),
        ({"task__labels": "tool,food,beast"},
         "prompt.init={0} has a head for the classes beast, food, tool and this run has tool, "),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(
    fields, told, trained, backbone, data, tmp_path, refused
):
    export = str(trained / "export")
    given = {"prompt__init": export, "train__init_head": True} | fields
    given = {name: str(x).replace("{0}", export) for name, x in given.items()}
    (tmp_path / "c.json").write_text(make_config(backbone, data, "prefix", **given).to_json())
    place = (f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'run'}")
    line = refused("train", *place, started=True)
    assert line.startswith("train.init_head=True") and told.format(export) in line


def first_numbers(c) -> dict[str, np.ndarray]:
    """Makes the numbers of a prompt before its first step. -> arrays by name"""
    placement = build_placement(c)
    backbone, loaded = load_weights(open_fitting(c, placement), placement)
    scorer = scorer_from_config(c, backbone, read_examples(c), placement)
    trainable = start(c, scorer, loaded, None, placement).trainable
    return {
        name.removeprefix("prompt/"): np.asarray(rows)
        for name, rows in trainable.items()
        if name.startswith("prompt/")
    }


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A Gemma's folder, its embeddings as torch computes them, and the rows of its table."""
    torch = pytest.importorskip("torch")
    import transformers

    folder = make_backbone(tmp_path_factory.mktemp("gemma") / "gemma", "gemma")
    embed = transformers.GemmaForCausalLM.from_pretrained(folder).get_input_embeddings()
    ids = lambda text: encode_texts(load_tokenizer(folder), [text])[0]
    scaled = lambda text: embed(torch.tensor(ids(text))).detach().numpy()
    unscaled = lambda text: embed.weight.detach()[ids(text)].numpy()
    return folder, scaled, unscaled


def test_soft_tokens_start_as_gemma_scales_its_embeddings(gemma, data):
    folder, scaled, unscaled = gemma
    assert np.abs(scaled("it was") / unscaled("it was") - 32**0.5).max() < 1e-5
    own = dict(prompt__text="it was", prompt__length=2, head__pooler="mean")
    c = make_config(folder, data, "soft", arguments=dict(start="text"), **own)
    np.testing.assert_allclose(first_numbers(c)["table"], scaled("it was"), rtol=1e-6)


def test_label_rows_start_as_gemma_scores_its_words(gemma, data):
    folder, scaled, unscaled = gemma
    own = dict(
        prompt__text="it was", prompt__length=2, prompt__fluency=0, task__words="beast,food,tool",
        task__labels="beast,food,tool", task__template="{text} [soft*2] [mask]",
    )  # fmt: skip
    found = first_numbers(make_config(folder, data, "dart", **own))
    np.testing.assert_allclose(found["table"], scaled(" it was"), rtol=1e-6)
    means = [unscaled(f" {word}").mean(0) for word in ("beast", "food", "tool")]
    np.testing.assert_allclose(found["rows"], np.stack(means), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spaced", [True, False])
def test_soft_tokens_start_from_the_label_words_that_the_head_reads(spaced, data, tmp_path):
    """Behind a space and without one they are other tokens."""
    import transformers

    folder = make_backbone(tmp_path / "gpt2", "gpt2")
    words, tokenizer = ("it", "was", "the"), load_tokenizer(folder)
    ids = [encode_texts(tokenizer, [" " * spaced + word])[0] for word in words]
    assert ids != [encode_texts(tokenizer, [" " * (not spaced) + word])[0] for word in words]
    own = dict(
        prompt__length=3, task__words=words, task__labels="beast,food,tool",
        task__spaced=str(spaced).lower(), task__template="{text} [mask]", head__name="verbalizer",
    )  # fmt: skip
    found = first_numbers(make_config(folder, data, "soft", arguments=dict(start="labels"), **own))
    table = transformers.GPT2LMHeadModel.from_pretrained(folder).transformer.wte.weight
    means = [table.detach().numpy()[row].mean(0) for row in ids]
    np.testing.assert_allclose(found["table"], np.stack(means), rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_label_rows_start_from_an_output_table_of_its_own(data, tmp_path, capsys):
    """By which the model scores words; `inspect` finds their words in it."""
    import transformers

    folder = make_backbone(tmp_path / "llama", "llama", tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    words, tokenizer = ("cat", "soup", "hammer"), load_tokenizer(folder)
    ids = [encode_texts(tokenizer, [f" {word}"])[0] for word in words]
    own = dict(
        prompt__text="it was", prompt__length=2, prompt__fluency=0, task__words=words,
        task__labels="beast,food,tool", task__template="{text} [soft*2] [mask]",
        optim__lr=0.0, train__total_steps=1, train__eval_steps=1,
    )  # fmt: skip
    c = make_config(folder, data, "dart", **own)
    table = model.lm_head.weight.detach().numpy()
    assert not np.allclose(table, model.get_input_embeddings().weight.detach().numpy())
    means = np.stack([table[row].mean(0) for row in ids])
    np.testing.assert_allclose(first_numbers(c)["rows"], means, rtol=1e-5, atol=1e-7)
    _, workdir, _ = train_and_export(capsys, tmp_path, c)
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}")
    assert code == 0, err
    rows = json.loads((workdir / "inspect" / "inspect.json").read_text())["rows"]
    rows = [row for row in rows if row["kind"] == "label row"]
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    best = (unit(means) @ unit(table).T).argmax(-1)
    assert [row["nearest"][0]["id"] for row in rows] == best.tolist()
