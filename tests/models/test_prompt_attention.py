"""Attention on prompts against transformers' own probabilities, and what it leaves as it is."""

import dataclasses

import jax
import numpy as np
import pytest
import transformers
from tiny import CONFIGS, jit, make_batch, make_params, make_tiny

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.heads.linear import Classifier
from jaxprompt.models.model import Model
from jaxprompt.models.prompt_attention import attend_prompt
from jaxprompt.prompts import make_prompt

torch = pytest.importorskip("torch")

LENGTH = 3


def build(family, method, **fields):
    """-> model, params"""
    backbone, weights = make_tiny(family)
    prompt = make_prompt(method, backbone.dims, length=LENGTH, **fields)
    model = Model(backbone, prompt, {"main": Classifier(3)})
    return model, make_params(model, weights)


def measure(model, params, batch):
    return jax.device_get(jit(lambda p, b: attend_prompt(model, p, b))(params, batch))


def average(mass, task_info):
    """Means over the queries that count. [B, N, T], bool [B, T] -> [B, N]"""
    return np.array([row[:, keep].mean(-1) for row, keep in zip(mass, task_info, strict=True)])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A random BERT in torch and here. -> torch's, module, params"""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **CONFIGS["bert"], initializer_range=0.3, attn_implementation="eager"
    )
    theirs = transformers.BertModel(config).eval()
    theirs.save_pretrained(folder)
    loaded = load_backbone(folder, "bert", read_config(folder))
    return theirs, make_backbone("bert", read_config(folder), loaded.report.heads), loaded.params


@pytest.mark.parametrize("method", ["prefix", "soft"])
def test_a_prompt_draws_what_transformers_says(bert, method):
    """`output_attentions` to 1e-5, with past keys and values, or rows that stand in the input.

    The queries of soft tokens do not count.
    """
    theirs, backbone, weights = bert
    prompt = make_prompt(method, backbone.dims, length=LENGTH)
    model = Model(backbone, prompt, {"main": Classifier(3)})
    params = make_params(model, weights)
    batch = make_batch(rows=5, slots=prompt.num_slots(), shift=prompt.position_shift())
    scores = measure(model, params, batch)
    assert set(scores) == {"encoder"}
    tokens, table = batch.encoder, np.asarray(params["prompt"]["table"])
    tensor = lambda x: torch.tensor(np.asarray(x))
    is_prompt, mask, past = np.asarray(tokens.slot) >= 0, tensor(tokens.mask) * 1.0, None
    is_query = np.asarray(tokens.mask) & ~is_prompt
    words = theirs.embeddings.word_embeddings(tensor(tokens.ids)).detach().numpy()
    if method == "soft":
        words[is_prompt] = table[np.asarray(tokens.slot)[is_prompt]]
    else:
        past = transformers.DynamicCache()
        for layer, (k, v) in enumerate(torch.tensor(table)):  # [L, 2, P, N, D]
            spread = lambda x: x.transpose(0, 1)[None].expand(5, -1, -1, -1)  # [B, N, P, D]
            past.update(spread(k), spread(v), layer)
        mask = torch.cat([torch.ones(5, LENGTH), mask], 1)
        is_prompt = np.arange(mask.shape[1])[None] < LENGTH
    with torch.no_grad():
        out = theirs(
            inputs_embeds=tensor(words), token_type_ids=tensor(tokens.types),
            position_ids=tensor(tokens.positions), attention_mask=mask, past_key_values=past,
            output_attentions=True,
        )  # fmt: skip
    for layer, probs in enumerate(out.attentions):  # [B, N, T, P+T]
        mass = (probs.numpy() * is_prompt[:, None, None]).sum(-1)
        expected = average(mass, is_query)
        np.testing.assert_allclose(scores["encoder"].tokens[:, layer], expected, rtol=0, atol=1e-5)
        read = mass[np.arange(5), :, batch.label_pos[:, 0]]
        np.testing.assert_allclose(scores["encoder"].read[:, layer], read, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores["encoder"].uniform, LENGTH / mask.sum(-1), rtol=1e-6)


FIELDS = {"t5": {"decoder": LENGTH, "cross": LENGTH}}


@pytest.mark.long_cases("bert", "t5")
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "glm"])
def test_layers_without_a_prefix_give_it_nothing(family):
    model, params = build(family, "prefix", layers="2-2", **FIELDS.get(family, {}))
    scores = measure(model, params, make_batch(rows=4, shift=LENGTH, family=family))
    tokens = scores["encoder"].tokens
    assert tokens[:, 0].max() == 0 and tokens[:, 1].min() > 0
    if family == "t5":
        assert scores["decoder"].tokens.shape == scores["cross"].tokens.shape == (4, 3, 2)
        assert np.isnan(scores["encoder"].read).all() and scores["cross"].read.min() > 0
    elif family == "glm":
        written = scores["decoder"]
        assert set(scores) == {"encoder", "decoder"} and np.isnan(scores["encoder"].read).all()
        for tokens in (written.tokens, written.read):
            assert tokens.shape == (4, 2, 2) and tokens[:, 0].max() == 0 and tokens[:, 1].min() > 0
    else:
        heads = 4 if family == "llama" else 2
        assert set(scores) == {"encoder"} and scores["encoder"].read.shape == (4, 2, heads)


@pytest.mark.long_cases("bert", "t5")
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "glm"])
def test_a_prompt_whose_keys_are_all_the_same_draws_its_share(family):
    """Where queries are 0 every key that is seen has the same probability."""
    model, params = build(family, "soft", **({"decoder": 2} if family == "t5" else {}))
    flat = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if any("query" in str(p) or "bias" in str(p) for p in path) else x,
        params["backbone"],
    )
    slots = {"slots": LENGTH} | ({"decoder_slots": 2} if family == "t5" else {})
    scores = measure(model, params | {"backbone": flat}, make_batch(rows=4, family=family, **slots))
    streams = {"t5": {"encoder", "decoder", "cross"}, "glm": {"encoder", "decoder"}}
    assert set(scores) == streams.get(family, {"encoder"})
    for attention in scores.values():
        wanted = np.broadcast_to(attention.uniform[:, None, None], attention.tokens.shape)
        np.testing.assert_allclose(attention.tokens, wanted, rtol=1e-5)


def test_nothing_of_a_prompt_is_met_where_there_is_none():
    backbone, weights = make_tiny()
    model = Model(backbone, make_prompt("none", backbone.dims), {"main": Classifier(3)})
    assert measure(model, make_params(model, weights), make_batch()) == {}


@pytest.mark.long_cases("scan")
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_the_way_that_layers_run_changes_nothing(stack):
    model, params = build("bert", "prefix", layers="1-1")
    cfg = dataclasses.replace(model.backbone.cfg, stack=stack, remat="full")
    other = dataclasses.replace(model, backbone=model.backbone.clone(cfg=cfg))
    batch = make_batch(rows=3, shift=LENGTH)
    wanted, scores = measure(model, params, batch), measure(other, params, batch)
    jax.tree.map(np.testing.assert_array_equal, scores, wanted)
