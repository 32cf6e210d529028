"""Prefixes of the library `adapters`, whose folders these tests write as its version 1.3.0 does.

The files were compared with those that the library wrote, and its hidden states and logits with
ours (docs/from_peft.md).
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxprompt.convert.adapterhub import read_classifier, read_prefixes
from jaxprompt.errors import InputError
from jaxprompt.serving.adapters import import_prompt, split_prefixes
from jaxprompt.types import Dims

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from tiny_run import make_backbone  # noqa: E402

import jaxprompt as jp  # noqa: E402

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

P, LAYERS, HEADS, HEAD_DIM = 4, 2, 2, 16
WIDTH = 2 * LAYERS * HEADS * HEAD_DIM
CONFIG = {
    "architecture": "prefix_tuning", "bottleneck_size": 7, "cross_prefix": True, "dropout": 0.0,
    "encoder_prefix": True, "flat": True, "init_weights_seed": None, "leave_out": [],
    "non_linearity": "tanh", "prefix_length": P, "shared_gating": True, "use_gating": False,
}  # fmt: skip
HEAD = {
    "activation_function": "tanh", "bias": True, "dropout_prob": None, "layers": 2,
    "head_type": "classification", "num_labels": 3, "use_pooler": False,
}  # fmt: skip


def write_folder(folder, prefixes, *, base="", head=None, head_config=None, **config):
    """Writes state dicts of prefixes by attention, listed again below each layer's pool."""
    tensors = {}
    for attention, tensor_dict in prefixes.items():
        for name, tensor in tensor_dict.items():
            tail = f"prefix_tunings.mine.{attention}.{name}"
            tensors[f"{base}prefix_tuning.{tail}"] = tensor
            for layer in range(LAYERS):
                pool = f"{base}encoder.layer.{layer}.attention.self.prefix_tuning.pool."
                tensors[pool + tail] = tensor
    torch.save(tensors, folder / "pytorch_adapter.bin")
    about = {"config": CONFIG | config, "model_type": "bert", "name": "mine", "hidden_size": 32}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    if head is not None:
        named = {f"heads.mine.{name}": x for name, x in head.state_dict().items()}
        torch.save(named, folder / "pytorch_model_head.bin")
        about = {"config": HEAD | (head_config or {}), "name": "mine"}
        (folder / "head_config.json").write_text(json.dumps(about))


def mlp(seed=0):
    """Returns the modules that compute a prefix, and the prefix. -> [P, WIDTH]"""
    torch.manual_seed(seed)
    wte, first, last = torch.nn.Embedding(P, 32), torch.nn.Linear(32, 7), torch.nn.Linear(7, WIDTH)
    control = torch.nn.Sequential(first, torch.nn.Tanh(), last)
    tensors = {f"control_trans.{name}": x for name, x in control.state_dict().items()}
    return tensors | {"wte.weight": wte.weight.data}, control(wte.weight).detach()


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return make_backbone(tmp_path_factory.mktemp("backbone") / "roberta", "roberta")


def reference_scores(folder, flat, head, texts):
    """Scores texts by torch: past keys, and the positions of a text without a prefix. -> [B, C]"""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, return_tensors="pt"
    )
    ids, mask = batch["input_ids"], batch["attention_mask"]
    pad = model.config.pad_token_id
    positions = torch.where(mask > 0, pad + mask.cumsum(1), pad)
    states = flat.view(P, 2 * LAYERS, HEADS, HEAD_DIM).permute(1, 2, 0, 3)  # k_0, v_0, k_1, ...
    cache = transformers.DynamicCache()
    for layer in range(LAYERS):
        pair = (x.expand(len(ids), -1, -1, -1) for x in states[2 * layer : 2 * layer + 2])
        cache.update(*pair, layer)
    mask = torch.cat([torch.ones(len(ids), P, dtype=mask.dtype), mask], dim=1)
    with torch.no_grad():
        hidden = model(ids, mask, position_ids=positions, past_key_values=cache)[0]
        return head(hidden[:, 0]).softmax(-1).numpy()


def test_scores_are_those_of_torch(tmp_path, backbone):
    tensors, flat = mlp()
    torch.manual_seed(1)
    dropout = torch.nn.Dropout(0.0)
    layers = [dropout, torch.nn.Linear(32, 32), torch.nn.Tanh(), dropout, torch.nn.Linear(32, 3)]
    head = torch.nn.Sequential(*layers)
    head[4].weight.data.normal_()
    write_folder(tmp_path, {"self_prefix": tensors}, base="roberta.", head=head, flat=False)
    texts = ["the cat eats rice with a saw", "a hammer", "rice"]
    loaded, prompt = jp.load_backbone(str(backbone)), jp.load_prompt(tmp_path)
    task = jp.task("text", labels=("a", "b", "c"))
    model = jp.attach(loaded, prompt, task=task, max_len=40)
    actual = np.array([list(row["scores"].values()) for row in jp.predict(model, texts)])
    expected = reference_scores(backbone, flat, head, texts)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert expected.std(axis=0).max() > 1e-3
    # Another head replaces that of the adapter.
    task |= {"words": ("cat", "rice", "saw"), "template": "{text} [mask]"}
    worded = jp.attach(loaded, prompt, task=task, head=jp.verbalizer(), max_len=40)
    assert set(worded.prompt.tensors) == {"prompt/k", "prompt/v"}
    # As an export it is complete.
    jp.save_prompt(model.prompt, tmp_path / "export")
    again = jp.attach(loaded, jp.load_prompt(tmp_path / "export"))
    assert jp.predict(again, texts) == jp.predict(model, texts)


def test_an_mlp_is_computed(tmp_path):
    """DistilBERT's attention is called `self`."""
    tensors, expected = mlp()
    write_folder(tmp_path, {"self": tensors}, flat=False)
    prefixes = read_prefixes(tmp_path)
    assert list(prefixes) == ["self_prefix"]
    np.testing.assert_allclose(prefixes["self_prefix"], expected, rtol=0, atol=1e-6)


def opened(family, style="masked"):
    dims = Dims(50, 32, 32, LAYERS, HEADS, HEAD_DIM, 64, decoder_layers=3)
    return SimpleNamespace(family=family, module=SimpleNamespace(dims=dims, STYLE=style))


def test_an_encoder_decoder_has_three_attentions(tmp_path):
    generator = torch.Generator().manual_seed(0)
    flat = {
        name: torch.randn(P * 2 * layers * HEADS * HEAD_DIM, generator=generator)
        for name, layers in {"encoder_prefix": LAYERS, "self_prefix": 3, "cross_prefix": 3}.items()
    }
    write_folder(tmp_path, {name: {"control_trans": x} for name, x in flat.items()}, base="model.")
    split = split_prefixes("x", import_prompt(str(tmp_path)), opened("bart", "seq2seq"))
    spans = {"first": 0, "length": P}
    expected = {"name": "constant", "last": LAYERS, "decoder_last": 3, "cross_last": 3}
    for part in ("", "decoder_", "cross_"):
        expected |= {part + name: value for name, value in spans.items()}
    assert split.prompt == expected
    parts = {"": "encoder_prefix", "decoder_": "self_prefix", "cross_": "cross_prefix"}
    for part, name in parts.items():
        rows = flat[name].view(P, -1, 2, HEADS, HEAD_DIM)
        for i, pair in enumerate("kv"):
            actual = split.tensors[f"prompt/{part}{pair}"]  # [L, P, N, D]
            np.testing.assert_array_equal(actual, rows[:, :, i].permute(1, 0, 2, 3))


FLAT = {"self_prefix": {"control_trans": torch.zeros(P * WIDTH)}}


@pytest.mark.parametrize(
    "prefixes, config, value",
    [
        (FLAT, {"architecture": "lora"}, "'lora'"),
        (FLAT, {"leave_out": [0]}, r"leave_out=\[0\]"),
        (FLAT, {"use_gating": True}, "use_gating=True"),
        (FLAT, {"prefix_length": P + 1}, "pytorch_adapter.bin"),
        ({"self_prefix": {"wte.weight": torch.zeros(P, 32)}}, {}, "pytorch_adapter.bin"),
        ({"self_prefix": mlp()[0]}, {"non_linearity": "relu"}, "'relu'"),
        ({}, {}, "no prefix"),
        ({"self_prefix": {"control_trans": torch.full((P * WIDTH,), np.nan)}}, {}, "NaN"),
    ],
)
def test_other_adapters_are_one_line(tmp_path, prefixes, config, value):
    write_folder(tmp_path, prefixes, **config)
    with pytest.raises(InputError, match=value):
        read_prefixes(tmp_path)


def test_broken_folders_are_one_line(tmp_path):
    write_folder(tmp_path, FLAT)
    path = tmp_path / "pytorch_adapter.bin"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="pytorch_adapter.bin"):
        read_prefixes(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="pytorch_adapter.bin"):
        read_prefixes(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="peft_type"):
        import_prompt(str(tmp_path))


@pytest.mark.parametrize(
    "family, attention, value",
    [("t5", "self_prefix", "a t5"), ("bert", "cross_prefix", "cross_prefix"), ("gpt2", "self", "")],
)
def test_other_backbones_are_refused(tmp_path, family, attention, value):
    write_folder(tmp_path, {attention: FLAT["self_prefix"]})
    imported, backbone = import_prompt(str(tmp_path)), opened(family)
    if not value:
        assert split_prefixes("x", imported, backbone).tensors["prompt/k"].shape[0] == LAYERS
        backbone.module.dims = backbone.module.dims._replace(layers=3)
        value = r"\[4, 128\]; 3 layers"
    with pytest.raises(InputError, match=value):
        split_prefixes("x", imported, backbone)


def test_heads_of_other_forms_are_left_out(tmp_path):
    """One of another kind is; one of one layer is read, and without a bias refused."""
    one = torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(32, 3))
    for config, pooler in (
        ({"layers": 1}, "cls"),
        ({"layers": 1, "use_pooler": True}, "checkpoint"),
        ({"layers": 1, "head_type": "tagging"}, ""),
        ({"layers": [1]}, ""),
        ({"layers": 3}, ""),
    ):
        write_folder(tmp_path, FLAT, head=one, head_config=config)
        imported = import_prompt(str(tmp_path))
        assert imported.head.get("pooler", "") == pooler
        assert ("head/main/out/kernel" in imported.tensors) == bool(pooler)
        assert split_prefixes("x", imported, opened("roberta")).head == imported.head
        decoder = split_prefixes("x", imported, opened("gpt2"))
        assert decoder.head == {} and set(decoder.tensors) == {"prompt/k", "prompt/v"}
    one[1].bias = None
    write_folder(tmp_path, FLAT, head=one, head_config={"layers": 1})
    with pytest.raises(InputError, match="pytorch_model_head.bin"):
        read_classifier(tmp_path)
