"""Filling the tree: the right numbers in the right place, one fingerprint, loud failures."""

import json
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import transformers
from folders import assert_same_params, load_folder, random_model, rewrite
from safetensors.numpy import load_file, save_file

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone, present_heads
from jaxprompt.errors import InputError
from jaxprompt.tree import flatten

torch = pytest.importorskip("torch")

SIZES = dict(
    vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
    intermediate_size=20, max_position_embeddings=16,
)  # fmt: skip
WORD = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def save_model(folder, name, **extra):
    model = random_model(name, SIZES | extra)
    model.save_pretrained(folder)
    return model


def load(folder, family="bert", **options):
    return load_folder(folder, family, **options)


@pytest.fixture
def pretraining(tmp_path):
    """A BERT with every head it can have, and its folder."""
    return save_model(tmp_path / "bert", "BertForPreTraining"), tmp_path / "bert"


def test_report(pretraining):
    _, folder = pretraining
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


def test_embeddings_project_only_where_widths_differ(tmp_path):
    save_model(tmp_path / "narrow", "ElectraForPreTraining", embedding_size=8)
    save_model(tmp_path / "equal", "ElectraForPreTraining", embedding_size=12)
    narrow, equal = (load(tmp_path / name, "electra").params for name in ("narrow", "equal"))
    assert narrow["embed"]["project"]["kernel"].shape == (8, 12)
    assert "project" not in equal["embed"]


def test_names_of_old_checkpoints(pretraining):
    _, folder = pretraining
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
    got = load(folder)
    assert got.report == expected.report
    assert_same_params(got.params, expected.params)


def test_a_tensor_under_two_names_is_reported_where_its_numbers_differ(pretraining):
    """Such as a norm of an older version that stands beside today's."""
    _, folder = pretraining
    norm = "bert.encoder.layer.1.output.LayerNorm"
    expected = load(folder).report

    def with_copies(tensors):
        scale, bias = tensors[f"{norm}.weight"], tensors[f"{norm}.bias"]
        return tensors | {f"{norm}.gamma": scale, f"{norm}.weight": scale + 1, f"{norm}.beta": bias}

    rewrite(folder, with_copies)
    report = load(folder).report
    assert report.unused == (f"{norm}.weight", *expected.unused)
    assert report.fingerprint == expected.fingerprint


def test_one_fingerprint_for_every_layout(pretraining, tmp_path):
    """Single, sharded, torch (with its tied copies) and unprefixed files of the same weights."""
    model, folder = pretraining
    expected = load(folder)
    layouts = {name: tmp_path / name for name in ("sharded", "torch", "bare")}
    model.save_pretrained(layouts["sharded"], max_shard_size="2KB")
    assert len(list(layouts["sharded"].glob("*.safetensors"))) > 2
    for name in ("torch", "bare"):
        shutil.copytree(folder, layouts[name])
    (layouts["torch"] / "model.safetensors").unlink()
    state = model.state_dict()
    assert "cls.predictions.decoder.weight" in state
    torch.save(state, layouts["torch"] / "pytorch_model.bin")
    rewrite(
        layouts["bare"],
        lambda tensors: {name.removeprefix("bert."): t for name, t in tensors.items()},
    )
    for name, layout in layouts.items():
        got = load(layout)
        assert got.report == expected.report, name
        assert_same_params(got.params, expected.params)


@pytest.mark.parametrize("name", [WORD, QUERY, "bert.pooler.dense.bias", "cls.predictions.bias"])
def test_any_changed_number_changes_the_fingerprint(pretraining, name):
    _, folder = pretraining
    before = load(folder).report.fingerprint

    def nudge(tensors):
        flat = tensors[name].reshape(-1)
        flat[-1] = np.nextafter(flat[-1], np.float32(9))

    rewrite(folder, nudge)
    assert load(folder).report.fingerprint != before


def test_fingerprint_tells_swapped_layers_and_dtypes(pretraining):
    _, folder = pretraining
    seen = {load(folder).report.fingerprint}
    other = QUERY.replace("layer.1", "layer.0")
    rewrite(folder, lambda t: t | {QUERY: t[other], other: t[QUERY]})
    seen.add(load(folder).report.fingerprint)
    rewrite(folder, lambda t: t | {QUERY: t[QUERY].astype(np.float16)})
    seen.add(load(folder).report.fingerprint)
    assert len(seen) == 3
    assert load(folder, dtype="bfloat16").report.fingerprint in seen


@pytest.mark.parametrize("file_dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(pretraining, file_dtype, dtype):
    _, folder = pretraining
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


def test_decoder_of_other_numbers_is_used_though_config_says_tied(pretraining):
    """transformers unties such a checkpoint too."""
    _, folder = pretraining
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
        ("-", {"num_hidden_layers": 3}, r"lacks 16 of the needed tensors: (\S+, ){5}\.\.\.; give"),
    ],
)
def test_missing_tensors_are_listed(pretraining, lost, config, message):
    _, folder = pretraining
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if lost not in n})
    with pytest.raises(InputError, match=message) as caught:
        load_backbone(folder, "bert", read_config(folder) | config)
    assert "\n" not in str(caught.value)


def test_another_family_is_an_error(pretraining):
    _, folder = pretraining
    with pytest.raises(InputError, match="needed tensors"):
        load_backbone(folder, "roberta", read_config(folder))
    with pytest.raises(InputError, match="unknown backbone family 'birt'; nearest: bert"):
        load_backbone(folder, "birt", read_config(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 51}, r"word_embeddings.weight .* has shape \[50, 12\], .* says \[51, 12\]"),
        ({"num_attention_heads": 5}, "hidden_size=12 must be divisible by num_attention_heads=5"),
        ({"hidden_size": None}, "hidden_size=None, which must be an integer"),
        ({"intermediate_size": "20"}, "intermediate_size='20'"),
    ],
)
def test_config_of_another_model_is_an_error(pretraining, change, message):
    _, folder = pretraining
    with pytest.raises(InputError, match=message) as caught:
        load_backbone(folder, "bert", read_config(folder) | change)
    assert "\n" not in str(caught.value)


def test_quantized_tensors_are_errors(pretraining):
    _, folder = pretraining
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


def test_fingerprint_is_stable_over_versions(tmp_path):
    """Exported prompts carry fingerprints: the hash of fixed numbers may never change."""
    names = {
        "embeddings.word_embeddings.weight": (3, 2),
        "embeddings.position_embeddings.weight": (4, 2),
        "embeddings.token_type_embeddings.weight": (1, 2),
        "embeddings.LayerNorm.weight": (2,),
        "embeddings.LayerNorm.bias": (2,),
    }
    layer = "encoder.layer.0."
    for name in ("self.query", "self.key", "self.value", "output.dense"):
        names |= {f"{layer}attention.{name}.weight": (2, 2), f"{layer}attention.{name}.bias": (2,)}
    for name, shape in (("intermediate.dense", (5, 2)), ("output.dense", (2, 5))):
        names |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        names |= {f"{layer}{name}.weight": (2,), f"{layer}{name}.bias": (2,)}
    tensors = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + i
        for i, (name, shape) in enumerate(names.items())
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "vocab_size": 3, "hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1,
        "intermediate_size": 5, "max_position_embeddings": 4, "type_vocab_size": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).report.fingerprint == (
        "c1fb484f95cc3e479543d2817dbb56b3cc6ff9b2d9ad426290f5d046d7fa6704"
    )


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
