"""BART against transformers, and prefixes in its three attentions against a statement in torch."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import transformers
from pairs import (
    assert_near,
    draw_tokens,
    make_batch,
    pair_fixture,
    randomise,
    read_ours,
    read_pair,
    run,
    states_and_logits,
)
from safetensors.numpy import load_file, save_file
from tiny import CONFIGS, jit

from jaxprompt.backbones import make_backbone
from jaxprompt.build.backbone import backbone_facts, backbone_from_config
from jaxprompt.build.scorer import build_scorer
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.load import load_config
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.prompt_metadata import ExampleLayout
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.tasks.task import Example
from jaxprompt.errors import InputError
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.runs.adapt import open_adaptable
from jaxprompt.tree import flatten
from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")

MODEL = 1e-4  # max abs, float32
SIZES = CONFIGS["bart"] | dict(
    vocab_size=60, d_model=24, encoder_attention_heads=3, decoder_attention_heads=3,
    activation_function="relu", scale_embedding=True,
)  # fmt: skip
HEADS, WIDTH = 3, 8
KINDS = {"scaled": SIZES, "plain": CONFIGS["bart"]}
LENGTHS = {"encoder": 4, "decoder": 3, "cross": 2}


def make_pair(folder, kind):
    torch.manual_seed(len(kind))
    model_class = transformers.BartForConditionalGeneration
    model = randomise(model_class(transformers.BartConfig(**KINDS[kind])), 0.2)
    model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return read_pair(folder, "bart", model_class)


pairs = pair_fixture(make_pair)


def batch_of(pair, shifts=(0, 0)):
    vocab = pair.config["vocab_size"]
    streams = draw_tokens(vocab, pad=1), draw_tokens(vocab, "right", (6, 2, 4), 6, seed=1, pad=1)
    return make_batch(
        *(
            x._replace(positions=x.positions + np.int32(n))
            for x, n in zip(streams, shifts, strict=True)
        )
    )


def torch_logits(model, batch, prefixes=None):
    """States BART once more; `prefixes` are [L, 2, P, N, D] of each stream, and shift positions."""
    inner, ids = model.model, torch.tensor(batch.encoder.ids).long()
    fed, positions = (torch.tensor(x).long() for x in (batch.decoder.ids, batch.decoder.positions))
    depths = {name: len(getattr(inner, name).layers) for name in ("encoder", "decoder")}
    depths["cross"] = depths["decoder"]
    prefixes = prefixes or {name: [None] * depth for name, depth in depths.items()}
    seen = torch.tensor(batch.encoder.mask)[:, None, None]  # [B, 1, 1, S]
    causal = torch.ones(fed.shape[1], fed.shape[1], dtype=bool).tril()[None, None]

    def split(x):
        return x.unflatten(-1, (model.config.encoder_attention_heads, -1)).transpose(1, 2)

    def attend(a, x, source, seen, prefix):
        k, v = split(a.k_proj(source)), split(a.v_proj(source))
        if prefix is not None:
            fronts = prefix.transpose(1, 2)[:, None].expand(-1, len(x), -1, -1, -1)
            k, v = (torch.cat(parts, dim=2) for parts in zip(fronts, (k, v), strict=True))
            seen = torch.nn.functional.pad(seen, (prefix.shape[1], 0), value=True)
        scores = split(a.q_proj(x)) @ k.transpose(2, 3) * a.scaling
        probs = scores.masked_fill(~seen, -1e9).softmax(-1)
        return a.out_proj((probs @ v).transpose(1, 2).flatten(2))

    def mlp(layer, x):
        return layer.final_layer_norm(x + layer.fc2(layer.activation_fn(layer.fc1(x))))

    places = torch.tensor(batch.encoder.positions).long()
    stack = inner.encoder
    x = stack.embed_tokens(ids) + stack.embed_positions.weight[places + 2]
    x = stack.layernorm_embedding(x)
    for layer, prefix in zip(stack.layers, prefixes["encoder"], strict=True):
        x = layer.self_attn_layer_norm(x + attend(layer.self_attn, x, x, seen, prefix))
        x = mlp(layer, x)
    source, stack = x, inner.decoder
    x = stack.embed_tokens(fed) + stack.embed_positions.weight[positions + 2]
    x = stack.layernorm_embedding(x)
    decoder = zip(stack.layers, prefixes["decoder"], prefixes["cross"], strict=True)
    for layer, prefix, cross in decoder:
        x = layer.self_attn_layer_norm(x + attend(layer.self_attn, x, x, causal, prefix))
        y = attend(layer.encoder_attn, x, source, seen, cross)
        x = mlp(layer, layer.encoder_attn_layer_norm(x + y))
    return x, model.lm_head(x) + model.final_logits_bias


@pytest.mark.default_cases("scaled")
@pytest.mark.parametrize("kind", KINDS)
def test_states_logits_and_gradients(pairs, tmp_path, kind):
    pair = pairs(kind)
    batch = batch_of(pair)
    ids, mask, fed, fed_mask = (
        torch.tensor(x).long()
        for x in (batch.encoder.ids, batch.encoder.mask, batch.decoder.ids, batch.decoder.mask)
    )
    expected = pair.torch(
        input_ids=ids, attention_mask=mask, decoder_input_ids=fed, output_hidden_states=True,
        decoder_attention_mask=fed_mask,
    )  # fmt: skip
    hidden, logits = run(pair, batch)
    bias = pair.module.bind({"params": pair.params}).lm_table()[1]
    visible = batch.decoder.mask
    assert_near(hidden, expected.decoder_hidden_states[-1].detach(), MODEL, visible)
    assert_near(logits + bias, expected.logits.detach(), MODEL, visible)
    assert expected.logits.std() > 0.3
    weigh = np.random.default_rng(0).normal(size=logits.shape) * visible[..., None] / 10
    (expected.logits * torch.tensor(weigh).float()).sum().backward()
    # Saved in the weights' place, gradients come back by our names.
    (tmp_path / "config.json").write_text(json.dumps(pair.config))
    tensors = load_file(pair.folder / "model.safetensors")
    torch_grads = {
        n: p.grad.numpy() for n, p in pair.torch.named_parameters() if p.grad is not None
    }
    save_file(
        {n: torch_grads.get(n, 0 * x) for n, x in tensors.items()}, tmp_path / "model.safetensors"
    )
    expected = flatten(load_backbone(tmp_path, "bart", pair.config).params)

    # One layer of each stack is compiled.
    module = pair.module.clone(cfg=dataclasses.replace(pair.module.cfg, stack="scan"))

    def loss(params):
        _, logits = module.apply({"params": params}, batch, Injection(), method=states_and_logits)
        return (logits * weigh).sum()

    gradients = flatten(jit(jax.grad(loss))(pair.params))
    assert gradients.keys() == expected.keys()
    # In torch neither the bias, a buffer, nor the padding's row has a gradient.
    del gradients["lm_bias"]
    word = gradients["embed/word/table"]
    gradients["embed/word/table"] = word.at[1].set(expected["embed/word/table"][1])
    for path, gradient in gradients.items():
        assert_near(gradient, expected[path], 1e-4 * max(np.abs(expected[path]).max(), 1e-2))


def test_prefixes_stand_in_all_attentions(pairs):
    """With shift, positions of the text start behind the prefix, in the encoder and the decoder."""
    pair, rng = pairs("scaled"), np.random.default_rng(4)
    batch = batch_of(pair)
    with torch.no_grad():
        stated = torch_logits(pair.torch, batch)[0]
    assert_near(run(pair, batch)[0], stated, MODEL, batch.decoder.mask)
    tables, streams = {}, {}
    for stream, length in LENGTHS.items():
        layers = pair.config["encoder_layers" if stream == "encoder" else "decoder_layers"]
        k, v = rng.normal(size=(2, layers, 1, length, HEADS, WIDTH)).astype(np.float32)
        streams[stream] = Stream(prefix=Prefix(k, v, np.ones((layers, 1, length), bool)))
        tables[stream] = torch.tensor(np.stack([k[:, 0], v[:, 0]], axis=1))
    batch = batch_of(pair, (LENGTHS["encoder"], LENGTHS["decoder"]))
    with torch.no_grad():
        expected = torch_logits(pair.torch, batch, tables)[0]
    hidden, _ = run(pair, batch, Injection(**streams))
    assert_near(hidden, expected, MODEL, batch.decoder.mask)
    assert (expected - stated).abs().numpy()[batch.decoder.mask].max() > 0.1


@pytest.mark.long
def test_a_bare_model_has_no_output_bias(pairs, tmp_path):
    """As facebook/bart-base: names without a prefix."""
    pair = pairs("plain")
    pair.torch.model.save_pretrained(tmp_path)
    module, params, report = read_ours(tmp_path, "bart")
    assert report.heads == ("lm",) and report.absent == ("lm_bias",) and not report.unused
    found, _ = run(pair, batch_of(pair), module=module, params=params)
    assert_near(found, run(pair, batch_of(pair))[0], 1e-6)


def test_forced_tokens_are_those_of_generation(tmp_path):
    """transformers 5 writes them into generation_config.json, older versions into config.json."""
    fields = CONFIGS["bart"] | dict(model_type="bart", is_encoder_decoder=True)
    (tmp_path / "config.json").write_text(json.dumps(fields | dict(forced_bos_token_id=4)))
    tokens = []
    for generation in ({}, dict(forced_bos_token_id=0, forced_eos_token_id=5)):
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        hf = read_config(tmp_path)
        backbone = backbone_from_config(BackboneConfig(), tmp_path, hf, ("lm",))
        tokens.append((backbone_facts(backbone).first, backbone.module.cfg.last))
    assert tokens == [((4,), 2), ((0,), 5)]


@pytest.fixture
def make_scorer(shared):
    """Returns a function that makes the scorer of a text head; it reads no weights."""
    folder = shared / "tokenizers/roberta"
    hf = CONFIGS["bart"] | dict(vocab_size=50265, model_type="bart", forced_bos_token_id=0)
    backbone = backbone_from_config(BackboneConfig(), folder, hf, ("lm",))
    task = custom_task(fields=("text",), target="answer")
    prompt = OpenBlock.from_dict({"name": "prefix", "length": 2, "decoder": 3, "cross": 1})

    def make(max_target):
        layout = ExampleLayout(
            form="text", max_len=24, max_target=max_target, multiple=8, padding_side="right",
            choices=1, answer="", eos=True,
        )  # fmt: skip
        return build_scorer(
            backbone, task, layout, prompt=prompt, head=OpenBlock("text"), template="{text}",
            batch=2,
        )  # fmt: skip

    return make


def test_texts_have_the_tokens_of_the_pre_training(make_scorer):
    scorer = make_scorer(35)
    example = Example({"text": "It rains"}, target="Take it")
    (row,) = scorer.encode([example], targets=True).rows[0]
    words = lambda text: scorer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert row.ids.tolist() == [0, *words("It rains"), 2]
    assert row.targets.tolist() == [*words("Take it"), 2]
    assert row.decoder.ids.tolist() == [2, 0, *words("Take it")]
    assert row.label_pos.tolist() == [1, 2, 3]
    generated = scorer.encoder.with_generation(5).encode(example)[0]
    assert generated.decoder.ids.tolist() == [2, 0]


def test_a_target_fits_the_positions_of_the_decoder(make_scorer):
    with pytest.raises(InputError, match="data.max_target=36 [+] 5 positions .* 40"):
        make_scorer(36)


def test_no_objective_adapts_it(pairs):
    config = load_config("adapt/prefix_lm").replace({"backbone.path": str(pairs("plain").folder)})
    with pytest.raises(InputError, match="objective.name=prefix_lm does not work with a bart"):
        open_adaptable(config, make_placement(1, 1))


def test_dims():
    dims = make_backbone("bart", CONFIGS["bart"], ("lm",)).dims
    assert (dims.width, dims.heads, dims.head_dim) == (16, 2, 8)
    assert (dims.layers, dims.decoder_layers, dims.max_len) == (2, 3, 40)
