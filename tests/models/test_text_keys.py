"""Keys and values of a text, against transformers, and against the text itself."""

import numpy as np
import pytest
import transformers
from tiny import assert_close, jit, make_batch, make_tiny

from jaxprompt.backbones import families, make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.models.text_keys import text_keys
from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")

IDS = np.array([7, 31, 4, 12, 50], np.int32)
BERT = dict(
    vocab_size=53, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
)
THEIRS = {
    "roberta": (transformers.RobertaModel, transformers.RobertaConfig(**BERT)),
    "gpt2": (
        transformers.GPT2Model,
        transformers.GPT2Config(vocab_size=53, n_embd=16, n_layer=2, n_head=2),
    ),
    "t5": (
        transformers.T5Model,
        transformers.T5Config(
            vocab_size=53, d_model=16, d_kv=6, num_heads=2, d_ff=24, num_layers=2,
            num_decoder_layers=3, decoder_start_token_id=0,
        ),
    ),
}  # fmt: skip


@pytest.mark.long_cases("bart-unroll", "distilbert-*", "gpt_neox-*", "opt-*", "t5-*")
@pytest.mark.parametrize("stack", ["scan", "unroll"])
@pytest.mark.parametrize("family", families())
def test_their_shapes(family, stack):
    backbone, params = make_tiny(family, stack=stack)
    actual = jit(lambda p: text_keys(backbone, p, IDS))(params)
    d = backbone.dims
    layers = {"encoder": d.layers}
    if d.decoder_layers:
        layers |= {"decoder": d.decoder_layers, "cross": d.decoder_layers}
    shapes = {
        stream: (num_layers, len(IDS), d.heads, d.head_dim) for stream, num_layers in layers.items()
    }
    assert {s: (k.shape, v.shape) for s, (k, v) in actual.items()} == {
        stream: (shape, shape) for stream, shape in shapes.items()
    }


@pytest.mark.long_cases("t5")
@pytest.mark.parametrize("family", THEIRS)
def test_they_are_those_of_transformers(family, tmp_path):
    torch.manual_seed(0)
    cls, config = THEIRS[family]
    model = cls(config).eval()
    model.save_pretrained(tmp_path)
    outputs = {}

    def keep(name):
        def hook(module, inputs, output):
            outputs.setdefault(name, []).append(output[0].detach().numpy())

        return hook

    if family != "t5":
        for name, module in model.named_modules():
            if name.endswith(("attention.self.key", "attention.self.value")):
                module.register_forward_hook(keep(f"encoder {name[-5] == 'v'}"))
    else:
        for name, module in model.named_modules():
            stream = (
                "encoder" if name.startswith("encoder")
                else "cross" if "EncDecAttention" in name else "decoder"
            )  # fmt: skip
            if name.endswith(("Attention.k", "Attention.v")):
                module.register_forward_hook(keep(f"{stream} {name[-1] == 'v'}"))
    ids = torch.tensor(IDS)[None].long()
    fed = {"decoder_input_ids": ids} if family == "t5" else {}
    with torch.no_grad():
        out = model(input_ids=ids, **fed)
    backbone, report = load_backbone(tmp_path, family, read_config(tmp_path))
    module = make_backbone(family, read_config(tmp_path), report.heads)
    keys = text_keys(module, backbone, IDS)
    for stream, pair in keys.items():
        for values, part in zip(pair, (False, True), strict=True):
            if family == "gpt2":  # one product makes all three
                layers = out.past_key_values.layers
                expected = [(layer.values if part else layer.keys)[0].numpy() for layer in layers]
                expected = np.stack(expected).swapaxes(1, 2)
            else:
                expected = np.stack(outputs[f"{stream} {part}"]).reshape(values.shape)
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)


def test_in_front_they_are_the_text_itself():
    """A causal model that reads them as a prefix sees what it saw of the text."""
    backbone, params = make_tiny("gpt2")
    batch = make_batch(family="gpt2", side="left", shift=len(IDS))
    k, v = text_keys(backbone, params, IDS)["encoder"]
    prefix = Prefix(k[:, None], v[:, None], np.ones((len(k), 1, len(IDS)), bool))
    run = jit(lambda b, i: backbone.apply({"params": params}, b, i, deterministic=True))
    actual = run(batch, Injection(Stream(prefix=prefix)))
    tokens = batch.encoder
    front = np.broadcast_to(IDS, (len(tokens.ids), len(IDS)))
    join = lambda a, b: np.concatenate([a, b], axis=1)
    whole = tokens._replace(
        ids=join(front, tokens.ids), mask=join(front > 0, tokens.mask),
        slot=join(0 * front - 1, tokens.slot),
        positions=join(0 * front + np.arange(len(IDS)), tokens.positions),
        types=join(0 * front, tokens.types), roles=join(0 * front, tokens.roles),
    )  # fmt: skip
    expected = run(batch._replace(encoder=whole), Injection())[:, len(IDS) :]
    mask = tokens.mask[..., None]
    assert_close(np.where(mask, actual, 0), np.where(mask, expected, 0))
