"""What prompts and heads start from: words of a corpus, of a text, of the labels; an export."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import make_backbone, make_config

from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.examples import read_examples
from jaxprompt.build.initial_params import count_corpus, init_params
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import open_checked_backbone, scorer_from_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.models.text_keys import text_keys

COMMON = ["cat", "bread", "saw"]  # of the corpus; no training example repeats them so


def prompt_params(config, workdir=None) -> dict[str, np.ndarray]:
    """Returns the parameters of a prompt before its first step; those of a corpus index it."""
    placement = build_placement(config)
    backbone, loaded = load_weights(open_checked_backbone(config, placement), placement)
    scorer = scorer_from_config(config, backbone, read_examples(config), placement)
    counts = count_corpus(config, scorer, workdir) if workdir else None
    trainable = init_params(config, scorer, loaded, counts, placement).trainable
    return {
        name.removeprefix("prompt/"): np.asarray(rows)
        for name, rows in trainable.items()
        if name.startswith("prompt/")
    }


def test_frequent_words_are_those_of_the_corpus(backbone, data, tmp_path):
    text = " ".join(word for i, word in enumerate(COMMON) for _ in range(20 - i))
    (tmp_path / "corpus.txt").write_text(f"{text} the old lion near a red vice\n")
    fields = dict(
        prompt__start="frequent", prompt__top=3, prompt__length=3,
        corpus__path=tmp_path / "corpus.txt", corpus__processes=1,
    )  # fmt: skip
    params = prompt_params(make_config(backbone, data, "soft", **fields), tmp_path)["table"]
    ids = load_tokenizer(backbone).convert_tokens_to_ids(COMMON)
    weights = load_file(backbone / "model.safetensors")
    table = weights["bert.embeddings.word_embeddings.weight"]
    assert {row.tobytes() for row in params} == {table[i].tobytes() for i in ids}


def test_a_prefix_starts_from_what_the_model_gives_a_text(backbone, data):
    text = "cat bread saw lion red"
    fields = dict(prompt__start="text", prompt__text=text, prompt__length=4, prompt__layers="2-2")
    opened = open_backbone(make_config(backbone, data).backbone)
    loaded = load_backbone(backbone, opened.family, opened.hf).params
    ids = np.array(encode_texts(load_tokenizer(backbone), [text])[0][:4])
    k, v = text_keys(opened.module, loaded, ids)["encoder"]
    params = prompt_params(make_config(backbone, data, "prefix", **fields, mesh__model=2))
    np.testing.assert_allclose(params["table"], np.stack([k[1:2], v[1:2]], 1), atol=1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"head__name": "verbalizer", "task__template": "{text} it is [mask] ."},
         "prompt.init={0} has head.name=linear and this run verbalizer; use another export"),
        ({"task__labels": "tool,food,beast"},
         "prompt.init={0} has a head for the classes beast, food, tool and this run has tool, "),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(
    fields, message, trained, backbone, data, refused_config
):
    export = str(trained / "export")
    overrides = {"prompt__init": export, "train__init_head": True} | fields
    overrides = {name: str(x).replace("{0}", export) for name, x in overrides.items()}
    line = refused_config(make_config(backbone, data, "prefix", **overrides), "train")
    assert line.startswith("train.init_head=True") and message.format(export) in line


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
    fields = dict(prompt__text="it was", prompt__length=2, head__pooler="mean")
    config = make_config(folder, data, "soft", arguments=dict(start="text"), **fields)
    np.testing.assert_allclose(prompt_params(config)["table"], scaled("it was"), rtol=1e-6)


def test_label_rows_start_as_gemma_scores_its_words(gemma, data):
    folder, scaled, unscaled = gemma
    fields = dict(
        prompt__text="it was", prompt__length=2, prompt__fluency=0, task__words="beast,food,tool",
        task__labels="beast,food,tool", task__template="{text} [soft*2] [mask]",
    )  # fmt: skip
    params = prompt_params(make_config(folder, data, "dart", **fields))
    np.testing.assert_allclose(params["table"], scaled(" it was"), rtol=1e-6)
    means = [unscaled(f" {word}").mean(0) for word in ("beast", "food", "tool")]
    np.testing.assert_allclose(params["rows"], np.stack(means), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spaced", [True, False])
def test_soft_tokens_start_from_the_label_words_that_the_head_reads(spaced, data, tmp_path):
    """Behind a space and without one they are other tokens."""
    import transformers

    folder = make_backbone(tmp_path / "gpt2", "gpt2")
    words, tokenizer = ("it", "was", "the"), load_tokenizer(folder)
    ids = [encode_texts(tokenizer, [" " * spaced + word])[0] for word in words]
    assert ids != [encode_texts(tokenizer, [" " * (not spaced) + word])[0] for word in words]
    fields = dict(
        prompt__length=3, task__words=words, task__labels="beast,food,tool",
        task__spaced=str(spaced).lower(), task__template="{text} [mask]", head__name="verbalizer",
    )  # fmt: skip
    params = prompt_params(
        make_config(folder, data, "soft", arguments=dict(start="labels"), **fields)
    )
    table = transformers.GPT2LMHeadModel.from_pretrained(folder).transformer.wte.weight
    means = [table.detach().numpy()[row].mean(0) for row in ids]
    np.testing.assert_allclose(params["table"], np.stack(means), rtol=1e-5, atol=1e-7)


def test_label_rows_start_from_an_output_table_of_its_own(data, tmp_path):
    """By which the model scores words."""
    import transformers

    folder = make_backbone(tmp_path / "llama", "llama", tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    words, tokenizer = ("cat", "soup", "hammer"), load_tokenizer(folder)
    ids = [encode_texts(tokenizer, [f" {word}"])[0] for word in words]
    fields = dict(
        prompt__text="it was", prompt__length=2, prompt__fluency=0, task__words=words,
        task__labels="beast,food,tool", task__template="{text} [soft*2] [mask]",
    )  # fmt: skip
    table = model.lm_head.weight.detach().numpy()
    assert not np.allclose(table, model.get_input_embeddings().weight.detach().numpy())
    means = np.stack([table[row].mean(0) for row in ids])
    params = prompt_params(make_config(folder, data, "dart", **fields))
    np.testing.assert_allclose(params["rows"], means, rtol=1e-5, atol=1e-7)
