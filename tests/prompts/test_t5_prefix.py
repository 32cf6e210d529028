"""Prefixes in the three attentions of T5, against an independent statement in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from tiny import assert_close, fill, jit

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Batch, Dims, Tokens

torch = pytest.importorskip("torch")

TOLERANCE = 1e-4  # max abs, float32
# heads * d_kv is not d_model, and the depths differ.
SIZES = dict(
    vocab_size=60, d_model=24, num_heads=3, d_kv=5, d_ff=40, num_layers=3, num_decoder_layers=2,
    decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=12,
)  # fmt: skip
LENGTHS = {"length": 4, "decoder": 3, "cross": 2}
TABLES = {"length": "table", "decoder": "decoder_table", "cross": "cross_table"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random T5 in torch and in ours."""
    torch.manual_seed(2)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("t5")
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "relative" in name else 0.1
            parameter.add_(scale * torch.randn_like(parameter))
    model.save_pretrained(folder)
    config = read_config(folder)
    params, report = load_backbone(folder, "t5", config)
    return model, make_backbone("t5", config, report.heads), params


# -- the statement ------------------------------------------------------------------------------


def split_heads(x):
    return x.unflatten(-1, (SIZES["num_heads"], SIZES["d_kv"])).transpose(1, 2)  # [B, N, T, D]


def attend(a, x, source, bias, prefix):
    """Keys and values of the prefix [P, N, D] stand in front; `bias` covers them."""
    front = lambda rows, y: torch.cat(
        [rows.transpose(0, 1)[None].expand(len(y), -1, -1, -1), split_heads(y)], dim=2
    )
    k, v = front(prefix[0], a.k(source)), front(prefix[1], a.v(source))
    scores = split_heads(a.q(x)) @ k.transpose(2, 3) + bias
    return a.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def self_bias(a, size, length, visible, shift):
    """The bias of prefix and text: over P + T with shift, 0 over the prefix without."""
    if shift:
        bias = a.compute_bias(length + size, length + size)[:, :, length:]
    else:
        bias = torch.cat([torch.zeros(1, 3, size, length), a.compute_bias(size, size)], dim=-1)
    visible = torch.cat([torch.ones(*visible.shape[:-1], length, dtype=bool), visible], dim=-1)
    return bias + torch.where(visible, 0.0, -1e9)


def stated(model, ids, mask, fed, tables, shift):
    """Runs T5 with prefixes [L, 2, P, N, D] of the encoder, decoder and cross attentions."""
    encoder, decoder = model.encoder, model.decoder
    encoder_table, decoder_own, cross = tables
    x, visible = model.shared(ids), mask[:, None, None]
    first = encoder.block[0].layer[0].SelfAttention
    bias = self_bias(first, ids.shape[1], encoder_table.shape[2], visible, shift)
    for block, prefix in zip(encoder.block, encoder_table, strict=True):
        attention, mlp = block.layer
        y = attention.layer_norm(x)
        x = mlp(x + attend(attention.SelfAttention, y, y, bias, prefix))
    source, x = encoder.final_layer_norm(x), model.shared(fed)
    first, size = decoder.block[0].layer[0].SelfAttention, fed.shape[1]
    causal = torch.ones(size, size, dtype=bool).tril()[None, None]
    bias = self_bias(first, size, decoder_own.shape[2], causal, shift)
    visible = torch.cat(
        [torch.ones(*visible.shape[:-1], cross.shape[2], dtype=bool), visible], dim=-1
    )
    for block, prefix, over in zip(decoder.block, decoder_own, cross, strict=True):
        attention, reading, mlp = block.layer
        y = attention.layer_norm(x)
        x = x + attend(attention.SelfAttention, y, y, bias, prefix)
        y, hidden = reading.layer_norm(x), torch.where(visible, 0.0, -1e9)
        x = mlp(x + attend(reading.EncDecAttention, y, source, hidden, over))
    return decoder.final_layer_norm(x)


# -- the comparison -----------------------------------------------------------------------------


def make_tokens(ids, mask, shift):
    positions = np.where(mask, mask.cumsum(1) - 1 + shift, 0)
    ids, positions = np.int32(ids), np.int32(positions)
    return Tokens(ids, mask, 0 * ids - 1, positions, 0 * ids, np.zeros(ids.shape, np.int8))


@pytest.mark.default_cases("streams3-*", "streams0-False", "streams2-False")
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("streams", [(), *[(name,) for name in LENGTHS], tuple(LENGTHS)])
def test_prefixes_stand_where_they_say(pair, streams, shift):
    """With shift the bias runs over P + T; without, a prefix has bias 0: `adapters`' convention."""
    model, module, backbone = pair
    lengths = {name: length if name in streams else 0 for name, length in LENGTHS.items()}
    rng = np.random.default_rng(4)
    tables = []
    for name, length in lengths.items():
        layers = SIZES["num_layers" if name == "length" else "num_decoder_layers"]
        tables.append(np.float32(rng.normal(size=(layers, 2, length, 3, 5))))
    mask = np.arange(9)[None] < np.array([9, 5, 2])[:, None]
    ids, fed = np.where(mask, rng.integers(2, 60, mask.shape), 0), rng.integers(2, 60, (3, 6))
    with torch.no_grad():
        expected = stated(
            model, torch.tensor(ids), torch.tensor(mask), torch.tensor(fed),
            [torch.tensor(table) for table in tables], shift,
        ).numpy()  # fmt: skip
        if not streams:
            states = model(
                input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long(),
                decoder_input_ids=torch.tensor(fed), output_hidden_states=True,
            ).decoder_hidden_states[-1]  # fmt: skip
            np.testing.assert_allclose(expected, states.numpy(), atol=1e-5)
    fields = dict(**lengths, shift=shift) if streams else {}
    prompt = make_prompt("prefix" if streams else "none", module.dims, **fields)
    params = {"backbone": backbone, "prompt": {}}
    for table, (name, length) in zip(tables, lengths.items(), strict=True):
        if length:
            params["prompt"][TABLES[name]] = table
    rows = np.arange(3, dtype=np.int32)
    encoder = make_tokens(ids, mask, prompt.position_shift())
    decoder = make_tokens(fed, np.ones(fed.shape, bool), prompt.decoder_shift())
    batch = Batch(encoder, 0 * rows[:, None], 0 * rows, np.ones(3), rows, decoder)
    actual = jit(Model(module, prompt, {}).hidden)(params, batch)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


# -- shapes -------------------------------------------------------------------------------------


def dims_of(layers, decoder_layers, width, heads, head_dim):
    return Dims(99, width, width, layers, heads, head_dim, 2**31 - 1, decoder_layers)


def shapes_of(prompt):
    tokens = make_tokens(np.zeros((2, 3), int), np.ones((2, 3), bool), 0)
    rows = np.arange(2)
    batch = Batch(tokens, rows[:, None], rows, np.ones(2), rows, tokens)
    init = lambda: prompt.init(jax.random.key(0), batch, jnp.zeros((1, 1)), deterministic=True)
    params = jax.eval_shape(init)
    run = lambda p: prompt.apply(p, batch, jnp.zeros((1, 1)), deterministic=True)
    return params["params"], jax.eval_shape(run, params), (params, run)


def test_reparameterisation_makes_keys_as_wide_as_the_heads():
    layers, width, heads, head_dim = 8, 512, 6, 64  # of mT5-small, whose heads are narrower
    dims = dims_of(layers, layers, width, heads, head_dim)
    prompt = make_prompt("prefix", dims, length=0, decoder=3, hidden=7)
    params, injection, _ = shapes_of(prompt)
    out = layers * 2 * heads * head_dim
    assert jax.tree.map(lambda leaf: leaf.shape, params["decoder_mlp"]) == {
        "rows": (3, width),
        "down": {"kernel": (width, 7), "bias": (7,)},
        "up": {"kernel": (7, out), "bias": (out,)},
    }
    assert injection.decoder.prefix.v.shape == (layers, 1, 3, heads, head_dim)


def test_each_stream_has_its_interval_and_its_positions():
    fields = dict(layers="2-3", decoder_layers="1", cross_layers="3-4")
    dims = dims_of(3, 4, 24, 3, 5)
    for shift in (True, False):
        prompt = make_prompt("prefix", dims, **LENGTHS, **fields, shift=shift)
        params, _, (shapes, run) = shapes_of(prompt)
        injection = run(fill(shapes))
        masks = [stream.prefix.mask.all((1, 2)).tolist() for stream in injection[:3]]
        assert masks == [[0, 1, 1], [1, 0, 0, 0], [0, 0, 1, 1]]
        assert_close(injection.cross.prefix.v[2:, 0], fill(shapes)["params"]["cross_table"][:, 1])
        assert injection.cross.prefix.positions is None
        assert (prompt.position_shift(), prompt.decoder_shift()) == ((4, 3) if shift else (0, 0))
        for stream in (injection.encoder, injection.decoder):
            length = stream.prefix.k.shape[2]
            expected = range(length) if shift else None
            np.testing.assert_array_equal(stream.prefix.positions, expected)
