"""Filling the tree: the right numbers in the right place, one fingerprint, loud failures."""

import json
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import transformers
from folders import assert_same_params, load_folder, random_model, rewrite
from safetensors.numpy import load_file

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone, present_heads
from jaxprompt.errors import InputError
from jaxprompt.tree import flatten

torch = pytest.importorskip("torch")

SIZES = dict(
    vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
    intermediate_size=20, max_position_embeddings=16,
)  # fmt: skip
T5 = dict(
    vocab_size=30, d_model=12, d_kv=5, d_ff=14, num_layers=2, num_decoder_layers=3, num_heads=2,
    relative_attention_num_buckets=8,
)  # fmt: skip
GPT2 = dict(vocab_size=30, n_embd=12, n_layer=2, n_head=3, n_positions=9)
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
WORD = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def save_model(folder, name, **extra):
    sizes = {"T5": T5, "GP": GPT2}.get(name[:2], SIZES)
    model = random_model(name, sizes | extra)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders of a BERT, a T5 1.0, a gated T5 with tables of its own, and a GPT-2."""
    root = tmp_path_factory.mktemp("saved")
    save_model(root / "bert", "BertForPreTraining")
    save_model(root / "t5", "T5ForConditionalGeneration")
    save_model(root / "gated", "T5ForConditionalGeneration", feed_forward_proj="gated-gelu")
    table = np.random.default_rng(0).normal(size=(30, 12)).astype(np.float32)
    rewrite(root / "gated", lambda t: t | {"lm_head.weight": table}, tie_word_embeddings=False)
    save_model(root / "gpt2", "GPT2LMHeadModel")
    return root


def load(folder, family="bert", **options):
    return load_folder(folder, family, **options)


@pytest.fixture
def folders(saved, tmp_path):
    """Returns a function that copies a saved model, to be changed."""
    return lambda name: shutil.copytree(saved / name, tmp_path / name)


@pytest.fixture
def folder(folders):
    """The folder of a BERT with every head it can have."""
    return folders("bert")


@pytest.mark.parametrize("name", ["t5", "gated", "gpt2"])
def test_report_of_a_decoder(saved, name):
    params, report = load_folder(saved / name)
    assert report.heads == ("lm",) and report.absent == report.missing == report.unused == ()
    assert report.tied == (name != "gated") == ("lm" not in params)
    size = sum(tensor.size for tensor in load_file(saved / name / "model.safetensors").values())
    assert report.bytes == 4 * size


def test_report(folder):
    params, report = load(folder)
    assert report.heads == ("pooler", "mlm")
    assert report.absent == report.missing == ()
    assert report.unused == ("cls.seq_relationship.bias", "cls.seq_relationship.weight")
    assert report.tied
    assert report.bytes == sum(leaf.nbytes for leaf in flatten(params).values())


@pytest.mark.parametrize(
    ("name", "family", "heads", "first_missing"),
    [
        ("BertForMaskedLM", "bert", {"mlm"}, "bert.pooler.dense.weight"),
        ("BertModel", "bert", {"pooler"}, "cls.predictions.transform.dense.weight"),
        ("BertForTokenClassification", "bert", set(), "bert.pooler.dense.weight"),
        ("RobertaForMaskedLM", "roberta", {"mlm"}, "roberta.pooler.dense.weight"),
        ("RobertaModel", "roberta", {"pooler"}, "lm_head.dense.weight"),
        ("ElectraForPreTraining", "electra", {"rtd"}, "generator_predictions.dense.weight"),
        ("ElectraForMaskedLM", "electra", {"mlm"}, "discriminator_predictions.dense.weight"),
    ],
)
def test_heads_come_from_the_file(tmp_path, name, family, heads, first_missing):
    save_model(tmp_path, name)
    params, report = load(tmp_path, family)
    assert present_heads(tmp_path, family, read_config(tmp_path)) == set(report.heads) == heads
    assert set(params) - {"embed", "layers"} == heads
    assert (
        set(report.absent)
        == {"bert": {"pooler", "mlm"}, "roberta": {"pooler", "mlm"}}.get(family, {"mlm", "rtd"})
        - heads
    )
    assert report.missing[0] == first_missing
    assert report.unused == (("classifier.bias", "classifier.weight") if not heads else ())


def test_names_of_old_checkpoints(folder):
    expected = load(folder)

    def to_old(tensors):
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in tensors.items()
        }
        old["bert.embeddings.position_ids"] = np.arange(16)[None]
        return old

    rewrite(folder, to_old)
    loaded = load(folder)
    assert loaded.report == expected.report
    assert_same_params(loaded.params, expected.params)


def test_a_tensor_under_two_names_is_reported_where_its_numbers_differ(folder):
    """Such as a norm of an older version that stands beside today's."""
    norm = "bert.encoder.layer.1.output.LayerNorm"
    expected = load(folder).report

    def with_copies(tensors):
        scale, bias = tensors[f"{norm}.weight"], tensors[f"{norm}.bias"]
        return tensors | {f"{norm}.gamma": scale, f"{norm}.weight": scale + 1, f"{norm}.beta": bias}

    rewrite(folder, with_copies)
    report = load(folder).report
    assert report.unused == (f"{norm}.weight", *expected.unused)
    assert report.fingerprint == expected.fingerprint


@pytest.mark.parametrize("name", [WORD, QUERY, "bert.pooler.dense.bias", "cls.predictions.bias"])
def test_any_changed_number_changes_the_fingerprint(folder, name):
    before = load(folder).report.fingerprint

    def nudge(tensors):
        flat = tensors[name].reshape(-1)
        flat[-1] = np.nextafter(flat[-1], np.float32(9))

    rewrite(folder, nudge)
    assert load(folder).report.fingerprint != before


def test_fingerprint_tells_swapped_layers_and_dtypes(folder):
    fingerprints = {load(folder).report.fingerprint}
    other = QUERY.replace("layer.1", "layer.0")
    rewrite(folder, lambda t: t | {QUERY: t[other], other: t[QUERY]})
    fingerprints.add(load(folder).report.fingerprint)
    rewrite(folder, lambda t: t | {QUERY: t[QUERY].astype(np.float16)})
    fingerprints.add(load(folder).report.fingerprint)
    assert len(fingerprints) == 3
    assert load(folder, dtype="bfloat16").report.fingerprint in fingerprints


@pytest.mark.parametrize("file_dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(folder, file_dtype, dtype):
    path = folder / "model.safetensors"
    rewrite(folder, lambda tensors: {name: t.astype(file_dtype) for name, t in tensors.items()})
    stored = load_file(path)[WORD]
    assert stored.dtype == file_dtype
    leaves = flatten(load(folder, dtype=dtype).params)
    assert {leaf.dtype.name for leaf in leaves.values()} == {dtype}
    np.testing.assert_array_equal(leaves["embed/word/table"], stored.astype(dtype))


def test_untied_decoder_is_loaded(tmp_path):
    model = save_model(tmp_path, "BertForMaskedLM", tie_word_embeddings=False)
    params, report = load(tmp_path)
    assert not report.tied and report.unused == ()
    decoder = model.cls.predictions.decoder
    np.testing.assert_array_equal(params["mlm"]["table"], decoder.weight.detach().numpy())
    np.testing.assert_array_equal(params["mlm"]["bias"], decoder.bias.detach().numpy())


def test_decoder_of_other_numbers_is_used_though_config_says_tied(folder):
    """transformers unties such a checkpoint too."""
    other = np.random.default_rng(0).normal(size=(50, 12)).astype(np.float32)
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.decoder.weight": other})
    params, report = load(folder)
    assert not report.tied
    np.testing.assert_array_equal(params["mlm"]["table"], other)
    model = transformers.BertForPreTraining.from_pretrained(folder)
    np.testing.assert_array_equal(model.cls.predictions.decoder.weight.detach().numpy(), other)


BIAS = "cls.predictions.transform.dense.bias"


@pytest.mark.parametrize(
    "lost, config, message",
    [
        (".layer.1.output", {}, "lacks 4 of .*bert.encoder.layer.1.output.dense.weight"),
        ("bert.pooler.dense.bias", {}, "lacks 1 of the needed tensors: bert.pooler.dense.bias"),
        (BIAS, {}, f"lacks 1 of the needed tensors: {BIAS}"),
        ("-", {"tie_word_embeddings": False}, "lacks 1 of .*: cls.predictions.decoder.weight"),
        ("-", {"num_hidden_layers": 999}, "tensors, but config.json says 999 layers"),
        ("-", {"num_hidden_layers": 3}, r"lacks 16 of the needed tensors: (\S+, ){5}\.\.\.; give"),
    ],
)
def test_missing_tensors_are_listed(folder, lost, config, message):
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if lost not in n})
    with pytest.raises(InputError, match=message) as caught:
        load_backbone(folder, "bert", read_config(folder) | config)
    assert "\n" not in str(caught.value)


def test_another_family_is_an_error(folder):
    with pytest.raises(InputError, match="needed tensors"):
        load_backbone(folder, "roberta", read_config(folder))
    with pytest.raises(InputError, match="unknown backbone family 'birt'; nearest: bert"):
        load_backbone(folder, "birt", read_config(folder))


def test_quantized_tensors_are_errors(folder):
    rewrite(folder, lambda tensors: tensors | {QUERY: tensors[QUERY].astype(np.int8)})
    with pytest.raises(InputError, match="dtype i8, not one of .* unquantised"):
        load(folder)


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    """The peak is the tree and a few tensors, not a second copy of the file."""
    monkeypatch.setattr("jaxprompt.convert.tensor_reader._THREADS", 1)
    monkeypatch.setattr("jaxprompt.convert.tensor_reader._TILE", 32)
    sizes = dict(SIZES, hidden_size=96, num_hidden_layers=12, intermediate_size=384)
    config = transformers.BertConfig(**sizes)
    transformers.BertModel(config).save_pretrained(tmp_path)
    load(tmp_path)
    tracemalloc.start()
    _, report = load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = 96 * 384 * 4
    assert report.bytes > 30 * largest
    # Three tensors of numbers, and what Python itself and other threads allocate meanwhile.
    assert peak <= report.bytes + 6 * largest


LLAMA = dict(SIZES, num_key_value_heads=1, head_dim=4, bos_token_id=0, eos_token_id=1)


@pytest.mark.parametrize("name, tied", [("Llama", False), ("Qwen2", False), ("Gemma", True)])
def test_a_config_that_does_not_say_ties_as_transformers_does(tmp_path, name, tied):
    """Also where the file holds the word table for both."""
    kind, folder = getattr(transformers, f"{name}ForCausalLM"), tmp_path / "llama"
    sizes = dict(LLAMA, tie_word_embeddings=True, pad_token_id=0)
    kind(kind.config_class(**sizes)).save_pretrained(folder)
    path = folder / "config.json"
    said = json.loads(path.read_text())
    del said["tie_word_embeddings"]
    path.write_text(json.dumps(said))
    if not tied:
        with pytest.raises(InputError, match="lacks 1 of the needed tensors: lm_head.weight"):
            load(folder, "llama")
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    params, report = load(folder, "llama")
    assert kind.from_pretrained(folder).config.tie_word_embeddings == tied == report.tied
    assert tied == ("lm" not in params)


@pytest.mark.parametrize(
    "name, model",
    [("bert", "BertForPreTraining"), ("t5", "T5ForConditionalGeneration"),
     ("gpt2", "GPT2LMHeadModel")],
)  # fmt: skip
def test_one_fingerprint_for_every_layout(saved, folders, tmp_path, name, model):
    """Single, sharded, torch (with its tied copies), and with or without a prefix."""
    expected, folder = load_folder(saved / name), saved / name
    model = getattr(transformers, model).from_pretrained(folder)
    layouts = {layout: tmp_path / layout for layout in ("sharded", "torch")}
    model.save_pretrained(layouts["sharded"], max_shard_size="2KB")
    assert len(list(layouts["sharded"].glob("*.safetensors"))) > 2
    shutil.copytree(folder, layouts["torch"])
    (layouts["torch"] / "model.safetensors").unlink()
    state = model.state_dict()
    assert {"lm_head.weight", "cls.predictions.decoder.weight"} & state.keys()
    torch.save(state, layouts["torch"] / "pytorch_model.bin")
    layouts["other"] = folders(name)
    rename = {
        "bert": lambda name: name.removeprefix("bert."), "t5": "transformer.{}".format,
        "gpt2": lambda name: name.removeprefix("transformer."),
    }[name]  # fmt: skip
    rewrite(layouts["other"], lambda tensors: {rename(n): t for n, t in tensors.items()})
    for layout, path in layouts.items():
        loaded = load_folder(path)
        assert loaded.report == expected.report, layout
        assert_same_params(loaded.params, expected.params)


@pytest.mark.parametrize("copies", [*zip(COPIES[:2]), COPIES, (*COPIES, "shared.weight")])
def test_copies_of_the_word_table_are_one(saved, folders, copies):
    expected, folder = load_folder(saved / "t5"), folders("t5")

    def change(tensors):
        table = tensors.pop("shared.weight")
        return tensors | {name: table.copy() for name in copies}

    rewrite(folder, change)
    loaded = load_folder(folder)
    assert loaded.report == expected.report
    assert_same_params(loaded.params, expected.params)


@pytest.mark.parametrize("name", COPIES[:2])
def test_shared_is_read_where_another_word_table_differs(saved, folders, name):
    """Torch's decoder and logits read `shared`; the report tells of the other table."""
    expected, folder = load_folder(saved / "t5"), folders("t5")
    rewrite(folder, lambda tensors: tensors | {name: tensors["shared.weight"] + 1})
    loaded = load_folder(folder)
    assert loaded.report == expected.report._replace(unused=(name,))
    assert_same_params(loaded.params, expected.params)


def test_what_is_not_ours_is_reported_unused(tmp_path, folders):
    save_model(tmp_path / "classes", "T5ForSequenceClassification")
    report = load_folder(tmp_path / "classes").report
    heads = [
        f"classification_head.{x}.{y}" for x in ("dense", "out_proj") for y in ("bias", "weight")
    ]
    assert report.unused == tuple(heads)
    folder = folders("t5")  # as in the files of T5 1.0
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    rewrite(folder, lambda tensors: tensors | {name: np.ones((8, 2), np.float32)})
    assert load_folder(folder).report.unused == (name,)
    folder = folders("gpt2")
    rewrite(folder, lambda tensors: tensors | {"transformer.h.0.ln_3.weight": np.ones(12)})
    assert load_folder(folder).report.unused == ("transformer.h.0.ln_3.weight",)


@pytest.mark.parametrize(
    "family, name, more",
    [
        ("gpt2", "n_layer", "transformer.h.1."), ("t5", "num_layers", "encoder.block.1."),
        ("t5", "num_decoder_layers", "decoder.block.1."),
    ],
)  # fmt: skip
def test_a_config_of_fewer_layers_than_the_file_is_refused(folders, family, name, more):
    """As that of a smaller sibling: a backbone that is cut short would be loaded."""
    folder = folders(family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: 1}))
    with pytest.raises(InputError, match=f"{folder} has {more}.*, more layers than config.json"):
        load_folder(folder)


def test_weights_that_another_library_has_quantized_are_named(folders):
    folder = folders("gpt2")
    path = folder / "config.json"
    quantization = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantization))
    load_folder(folder)  # they may stand as numbers all the same
    name = "transformer.h.0.mlp.c_fc.weight"
    for tensor in (np.ones((72, 1), np.uint8), None):  # as bitsandbytes has them; as GPTQ has
        rewrite(folder, lambda old, new=tensor: old | {name: new} if new is not None else {
            key: x for key, x in old.items() if key != name
        })  # fmt: skip
        with pytest.raises(InputError, match="weights quantised with bitsandbytes, which is n"):
            load_folder(folder)


BAD = [
    (
        "bert",
        dict(vocab_size=51),
        r"word_embeddings.weight .* \[50, 12\], .* says \[51, 12\]",
    ),
    (
        "bert",
        dict(num_attention_heads=5),
        "hidden_size=12 must be divisible by num",
    ),
    ("bert", dict(intermediate_size="20"), "intermediate_size='20'"),
    ("t5", dict(d_kv=6), r"SelfAttention.q.weight .* has shape \[10, 12\], .* says \[12, 12\]"),
    ("t5", dict(relative_attention_num_buckets=32), r"has shape \[8, 2\], .* says \[32, 2\]"),
    ("t5", dict(num_decoder_layers=4), r"lacks 13 of the needed tensors: decoder.block.3"),
    (
        "t5",
        dict(feed_forward_proj="gated-gelu"),
        r"lacks 10 of .*block.0.layer.1.DenseReluDense.wi_0",
    ),
    ("gated", dict(feed_forward_proj="relu"), r"lacks 5 of .*DenseReluDense.wi.weight"),
    ("gpt2", dict(n_inner=40), r"h.0.mlp.c_fc.weight .* has shape \[12, 48\], .* says \[12, 40\]"),
    ("gpt2", dict(n_layer=3), "lacks 16 of the needed tensors: transformer.h.2.attn.c_attn.weight"),
    ("gpt2", dict(tie_word_embeddings=False), "lacks 1 of the needed tensors: lm_head.weight"),
    ("gpt2", dict(model_type="t5"), "lacks d_model, which must be an integer"),
]


@pytest.mark.parametrize("name, change, message", BAD)
def test_config_of_another_model_is_an_error(saved, name, change, message):
    config = read_config(saved / name) | change
    with pytest.raises(InputError, match=message) as caught:
        load_backbone(saved / name, config["model_type"], config)
    assert "\n" not in str(caught.value)


def test_a_fused_projection_of_another_width_is_an_error(folders):
    folder, name = folders("gpt2"), "transformer.h.1.attn.c_attn.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name][:, :24].copy()})
    with pytest.raises(InputError, match=r"has shape \[12, 24\], but config.json says \[12, 36\]"):
        load_folder(folder)


@pytest.mark.parametrize("file_dtype", [np.float32, np.float16])
def test_rescale_divides_what_writes_into_the_stream(folders, file_dtype):
    """Of a gated product half the factor is in its linear part: 10 x 10 = 100."""
    folder = folders("gated")
    rewrite(folder, lambda tensors: {n: t.astype(file_dtype) for n, t in tensors.items()})
    plain, divided = (load_folder(folder, rescale=factor) for factor in (1.0, 100.0))
    assert plain.report == divided.report
    by = {"attention/out": 100, "cross/out": 100, "embed/word": 100, "mlp/up": 10, "mlp/down": 10}
    flat = flatten(divided.params)
    for name, leaf in flatten(plain.params).items():
        factor = next((f for part, f in by.items() if part in name), 1)
        assert flat[name].dtype == np.float32
        np.testing.assert_allclose(flat[name] * factor, leaf, rtol=2e-7, err_msg=name)
    half = load_folder(folder, rescale=100.0, dtype="bfloat16").params["embed"]["word"]["table"]
    np.testing.assert_array_equal(half, flat["embed/word/table"].astype(half.dtype))


def test_rescale_of_an_ungated_gelu_is_an_error(saved):
    config = read_config(saved / "t5") | dict(feed_forward_proj="gelu")
    load_backbone(saved / "t5", "t5", config)
    with pytest.raises(InputError, match="rescale=100.0 needs a gated or relu feed-forward block"):
        load_backbone(saved / "t5", "t5", config, rescale=100.0)


@pytest.mark.parametrize(
    "name, fingerprint",
    [
        ("bert", "606ebcb0f94ec74aa1f716e0b82048cbe00e9ae70012b987879e07e1c7725267"),
        ("t5", "0ab75d64b11e4f9e42b7e526d078f04344755ebe9a46ef8eeb2801e9d6d20214"),
        ("gated", "72d2789834da2ccf22ce701d97d7c1ea247f07bc4616e1a4ec9772c058c122f8"),
        ("gpt2", "0fdb885f2a4d17de4c0f070ac9619dad34cde403b705a48b51820ada1ea63b18"),
    ],
)
def test_fingerprint_is_stable_over_versions(saved, folders, name, fingerprint):
    """Exported prompts carry fingerprints: the hash of fixed numbers may never change."""
    folder = folders(name)
    count = lambda i, t: np.arange(t.size, dtype=np.float32).reshape(t.shape) + i
    rewrite(
        folder, lambda tensors: {n: count(i, tensors[n]) for i, n in enumerate(sorted(tensors))}
    )
    assert load_folder(folder).report.fingerprint == fingerprint
