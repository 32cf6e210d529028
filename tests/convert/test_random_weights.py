"""Drawn weights: distributed as transformers draws them, complete, the same on every mesh."""

import dataclasses
import json
import math
import os

import jax
import numpy as np
import pytest
import transformers
from folders import ENCODER, UNTIED
from processes import Processes

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.random_weights import init_backbone, with_heads
from jaxprompt.errors import InputError
from jaxprompt.models.model import backbone_shapes
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.tree import flatten

torch = pytest.importorskip("torch")

WIDE = dict(
    vocab_size=203, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=80, max_position_embeddings=70, type_vocab_size=2, initializer_range=0.05,
)  # fmt: skip
T5 = dict(
    vocab_size=203, d_model=48, d_kv=10, num_heads=4, d_ff=80, num_layers=2, num_decoder_layers=3,
    decoder_start_token_id=0, relative_attention_num_buckets=32,
)  # fmt: skip
GPT2 = dict(vocab_size=203, n_embd=48, n_layer=5, n_head=4, n_positions=70, initializer_range=0.03)
LLAMA = dict(
    vocab_size=203, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, intermediate_size=80, max_position_embeddings=70,
    pad_token_id=None,
)  # fmt: skip
# kind: (family, class, config, heads)
MODELS = {
    "bert": ("bert", "BertForMaskedLM", WIDE, ["mlm"]),
    "bert-pooler": ("bert", "BertModel", WIDE | dict(pad_token_id=7), ["pooler"]),
    "bert-default": (
        "bert", "BertForMaskedLM", {n: x for n, x in WIDE.items() if n != "initializer_range"},
        ["mlm"],
    ),
    "bert-untied": ("bert", "BertForMaskedLM", WIDE | UNTIED, ["mlm"]),
    "roberta": ("roberta", "RobertaForMaskedLM", WIDE, ["mlm"]),
    "roberta-no-pad": ("roberta", "RobertaForMaskedLM", WIDE | dict(pad_token_id=3), ["mlm"]),
    "generator": ("electra", "ElectraForMaskedLM", WIDE | dict(embedding_size=24), ["mlm"]),
    "discriminator": ("electra", "ElectraForPreTraining", WIDE | dict(embedding_size=24), ["rtd"]),
    "t5": ("t5", "T5ForConditionalGeneration", T5, ["lm"]),
    "t5-gated": (
        "t5", "T5ForConditionalGeneration",
        T5 | UNTIED | dict(feed_forward_proj="gated-gelu", initializer_factor=0.5), ["lm"],
    ),
    "gpt2": ("gpt2", "GPT2LMHeadModel", GPT2, ["lm"]),
    # Neither says whether its tables are one.
    "llama": ("llama", "LlamaForCausalLM", LLAMA, ["lm"]),
    "gemma": ("llama", "GemmaForCausalLM", LLAMA | dict(model_type="gemma"), ["lm"]),
}  # fmt: skip
SIGMAS = 5


def draw(kind, *, mesh=(1, 1), seed=0, **options):
    family, _, config, heads = MODELS[kind]
    place = make_placement(*mesh, devices=jax.devices()[: mesh[0] * mesh[1]], fsdp=True)
    return init_backbone(family, config, heads, seed=seed, placement=place, **options)


@pytest.mark.long_cases("bert", "generator", "t5", "t5-gated")
@pytest.mark.parametrize("kind", MODELS)
def test_as_transformers_draws(tmp_path, kind):
    """Standard deviations and means within the error of the sample, constants exactly."""
    family, name, config, _ = MODELS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(1)
    model_class(model_class.config_class(**config)).save_pretrained(tmp_path)
    expected = flatten(load_backbone(tmp_path, family, read_config(tmp_path)).params)
    flat = flatten(draw(kind).params)
    if kind == "t5-gated":  # transformers 5 ties every T5; Mesh TensorFlow's is 1 / sqrt(inputs)
        rng = np.random.default_rng(0)
        expected["lm/table"] = rng.normal(0, 0.5 / math.sqrt(48), (203, 48))
    assert flat.keys() == expected.keys()
    for path, leaf in expected.items():
        ours, theirs = (np.asarray(x, np.float64) for x in (flat[path], leaf))
        assert ours.shape == theirs.shape, path
        if theirs.std() == 0:
            np.testing.assert_array_equal(ours, theirs, err_msg=path)
            continue
        if theirs.ndim == 2:  # rows of padding
            zero = np.flatnonzero(~theirs.any(-1))
            np.testing.assert_array_equal(np.flatnonzero(~ours.any(-1)), zero, err_msg=path)
            ours, theirs = (np.delete(x, zero, axis=0) for x in (ours, theirs))
        error = SIGMAS / math.sqrt(ours.size)  # of the difference of two: 1 / sqrt(2 n) each
        assert abs(ours.std() / theirs.std() - 1) < error, path
        assert abs(ours.mean()) < error * theirs.std(), path
        assert abs(np.mean((ours / ours.std()) ** 4) - 3) < 2 * SIGMAS * math.sqrt(24 / ours.size)


def test_padding_may_have_no_row():
    place = make_placement(1, 1, devices=jax.devices()[:1])
    config = WIDE | dict(pad_token_id=None)
    params = init_backbone("bert", config, ["mlm"], seed=0, placement=place).params
    assert np.asarray(params["embed"]["word"]["table"]).any(-1).all()


@pytest.mark.long_cases("mesh1-*", "mesh0-t5-gated")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)])
def test_every_parameter_of_the_module_is_there(kind, mesh):
    family, _, config, heads = MODELS[kind]
    loaded = draw(kind, mesh=mesh)
    module = make_backbone(family, config, heads)
    module = module.clone(cfg=dataclasses.replace(module.cfg, rows=204 if mesh[1] == 4 else 203))
    shapes = {name: leaf.shape for name, leaf in backbone_shapes(module).items()}
    flat = flatten({"backbone": loaded.params})
    assert {name: leaf.shape for name, leaf in flat.items()} == shapes
    place = make_placement(*mesh, devices=jax.devices()[: mesh[0] * mesh[1]], fsdp=True)
    for name, leaf in flat.items():
        assert leaf.sharding == place.param_sharding(name, leaf.shape), name
    assert loaded.report.bytes == sum(leaf.nbytes for leaf in flat.values())
    assert loaded.report.heads == () and loaded.report.absent == tuple(heads)
    assert loaded.report.tied == (
        "table" not in str([n for n in flat if "/mlm/" in n or "/lm/" in n])
    )


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_on_every_mesh(kind):
    """Rows of padding are zero, and nothing else differs."""
    one, many = draw(kind), draw(kind, mesh=(2, 4))
    assert one.report.fingerprint == many.report.fingerprint
    flat = flatten(many.params)
    for name, leaf in flatten(one.params).items():
        other, rows = np.asarray(flat[name]), len(leaf)
        np.testing.assert_array_equal(other[:rows], leaf, err_msg=name)
        assert not other[rows:].any()


def test_names_seeds_and_parts_differ():
    base = draw("generator")
    trees = [flatten(loaded.params) for loaded in (
        base, draw("generator", seed=1), draw("generator", part="generator")
    )]  # fmt: skip
    values = [np.asarray(tree[name]).ravel()[:96] for tree in trees for name in tree]
    values = [x.tobytes() for x in values if x.std() > 0]
    assert len(values) > 30 and len(set(values)) == len(values)
    kernel = np.asarray(trees[0]["layers/mlp/up/kernel"])
    assert len({layer.tobytes() for layer in kernel}) == 3
    marks = {draw("generator", seed=s, part=p).report.fingerprint
             for s in (0, 1) for p in ("backbone", "generator")}  # fmt: skip
    assert len(marks) == 4
    again = draw("generator")
    assert again.report == base.report
    for name, leaf in flatten(again.params).items():
        np.testing.assert_array_equal(leaf, trees[0][name])


def test_bfloat16_is_rounded_float32():
    wide, narrow = (flatten(draw("t5", dtype=x).params) for x in ("float32", "bfloat16"))
    for name, leaf in wide.items():
        np.testing.assert_array_equal(
            np.asarray(narrow[name]), np.asarray(leaf, narrow[name].dtype)
        )


def test_rescale_divides_what_writes_into_the_stream():
    plain, divided = (flatten(draw("t5-gated", rescale=x).params) for x in (1.0, 4.0))
    by = {"attention/out": 4, "cross/out": 4, "embed/word": 4, "mlp/up": 2, "mlp/down": 2}
    for name, leaf in plain.items():
        factor = next((f for part, f in by.items() if part in name), 1)
        np.testing.assert_array_equal(np.asarray(divided[name]) * factor, leaf, err_msg=name)


@pytest.mark.long
def test_two_processes_draw_what_one_draws(tmp_path):
    config = ENCODER | dict(model_type="bert")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    job = os.path.join(os.path.dirname(__file__), "save_job.py")
    with Processes(tmp_path / "logs") as processes:
        processes.start_all(2, [job, source, tmp_path / "out", "--seed=5"])
        assert processes.wait() == [0, 0], processes.told()
    place = make_placement(1, 1, devices=jax.devices()[:1])
    expected = flatten(init_backbone("bert", config, ["mlm"], seed=5, placement=place).params)
    flat = flatten(load_backbone(tmp_path / "out", "bert", config).params)
    assert flat.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(flat[name], leaf, err_msg=name)


def test_heads_that_a_checkpoint_lacks(tmp_path):
    transformers.BertModel(transformers.BertConfig(**ENCODER)).save_pretrained(tmp_path)
    config, place = read_config(tmp_path), make_placement(2, 4)
    loaded = load_backbone(tmp_path, "bert", config, placement=place)
    params, report = with_heads(loaded, "bert", config, ["mlm"], seed=0, placement=place)
    assert set(params) == {"embed", "layers", "mlm"} and "table" not in params["mlm"]
    assert (report.heads, report.absent, report.tied) == ((), ("mlm",), True)
    assert report.missing[0] == "cls.predictions.transform.dense.weight"
    assert report.fingerprint != loaded.report.fingerprint
    for part in ("embed", "layers"):
        old = flatten(loaded.params[part])
        assert all(leaf is old[name] for name, leaf in flatten(params[part]).items())
    random_head = init_backbone("bert", config, ["mlm"], seed=0, placement=place).params["mlm"]
    for name, leaf in flatten(random_head).items():
        np.testing.assert_array_equal(flatten(params["mlm"])[name], leaf)
    both = with_heads(loaded, "bert", config, ["pooler", "mlm"], seed=0, placement=place)
    assert both.report.heads == ("pooler",) and both.report.absent == ("mlm",)
    same = with_heads(loaded, "bert", config, ["pooler"], seed=0, placement=place)
    assert same.report._replace(absent=(), missing=()) == loaded.report._replace(
        absent=(), missing=()
    )


def test_a_fresh_head_may_be_untied(tmp_path):
    transformers.BertModel(transformers.BertConfig(**ENCODER)).save_pretrained(tmp_path)
    config, place = read_config(tmp_path) | UNTIED, make_placement(2, 4)
    loaded = load_backbone(tmp_path, "bert", config, placement=place)
    params, report = with_heads(loaded, "bert", config, ["mlm"], seed=0, placement=place)
    assert not report.tied and params["mlm"]["table"].shape == (56, 16)
    assert "cls.predictions.decoder.weight" in report.missing
    dropped = with_heads(
        loaded._replace(params=params, report=report), "bert", config, [], seed=0, placement=place
    )
    assert dropped.report.tied and set(dropped.params) == {"embed", "layers"}


@pytest.mark.parametrize(
    "family, head, heads", [("bert", "rtd", "pooler or mlm"), ("t5", "mlm", "lm"),
                            ("electra", "lm", "mlm or rtd")],
)  # fmt: skip
def test_a_head_that_the_family_has_not_is_an_error(family, head, heads):
    place = make_placement(1, 1, devices=jax.devices()[:1])
    kind = {"bert": "bert", "t5": "t5", "electra": "generator"}[family]
    message = f"an? {family} has no {head} head; use an objective for {heads}, or another backbone"
    with pytest.raises(InputError, match=message):
        init_backbone(family, MODELS[kind][2], [head], seed=0, placement=place)
    with pytest.raises(InputError, match=message):
        with_heads(draw(kind), family, MODELS[kind][2], [head], seed=0, placement=place)


BAD = [
    ("bert", dict(initializer_range="0.02"), "initializer_range='0.02', which must be above 0"),
    ("bert", dict(initializer_range=0), "initializer_range=0, which must be above 0"),
    ("roberta", dict(pad_token_id=[1]), "pad_token_id=.*, which must be a token id"),
]


@pytest.mark.parametrize("kind, change, message", BAD)
def test_a_wrong_config_is_one_line(kind, change, message):
    family, _, config, heads = MODELS[kind]
    place = make_placement(1, 1, devices=jax.devices()[:1])
    with pytest.raises(InputError, match=message) as caught:
        init_backbone(family, config | change, heads, seed=0, placement=place)
    assert "\n" not in str(caught.value)
