"""Loading onto a mesh: the same numbers and fingerprint, each device its part, no byte twice."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from folders import load_folder, random_model
from load_job import hashes
from processes import Processes
from safetensors.numpy import load_file, save_file

from jaxprompt import tree
from jaxprompt.convert import tensor_reader, weights
from jaxprompt.convert.folder import read_config
from jaxprompt.parallel.sharding import make_placement

torch = pytest.importorskip("torch")

JOB = Path(__file__).with_name("load_job.py")
VOCAB = 53  # divides neither 2 nor 4
BERT = dict(
    vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=24, max_position_embeddings=40,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB, d_model=16, d_kv=3, num_heads=4, d_ff=24, num_layers=2,
    num_decoder_layers=3, relative_attention_num_buckets=8,
)  # fmt: skip
GPT2 = dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=40)
UNTIED = dict(tie_word_embeddings=False)
MODELS = {
    "bert": ("BertForPreTraining", BERT),
    "roberta": ("RobertaForMaskedLM", BERT | UNTIED),
    "electra": ("ElectraForPreTraining", BERT | dict(embedding_size=8)),
    "t5": ("T5ForConditionalGeneration", T5 | dict(feed_forward_proj="gated-gelu")),
    "gpt2": ("GPT2LMHeadModel", GPT2),
}
MESHES = {  # data, model, fsdp
    "one": (1, 1, False), "fsdp": (8, 1, True), "tensor": (2, 4, False), "both": (4, 2, True),
}  # fmt: skip


def save_model(folder, family):
    model = random_model(*MODELS[family])
    if family == "t5":  # its config class ties whatever it is told
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 16))
    model.save_pretrained(folder, max_shard_size="8KB")
    if family == "t5":
        (folder / "config.json").write_text(json.dumps(read_config(folder) | UNTIED))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one of every family, each in several files."""
    root = tmp_path_factory.mktemp("sharded")
    for family in MODELS:
        save_model(root / family, family)
        assert len(list((root / family).glob("*.safetensors"))) > 2
    return root


@pytest.fixture(params=MESHES)
def placement(request):
    data, model, fsdp = MESHES[request.param]
    return make_placement(data, model, fsdp=fsdp, devices=jax.devices()[: data * model])


@pytest.fixture
def count_bytes(monkeypatch):
    """Counts the bytes that are read from tensors of safetensors files."""
    counts, read = [], os.preadv

    def count(*words):
        counts.append(read(*words))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", count)
    return lambda: sum(counts)


def stored_bytes(folder):
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return sum(tensor.nbytes for tensors in files for tensor in tensors.values())


def assert_holds(actual, expected, placement):
    """Compares a leaf bit for bit, its padding with zeros, and checks where it lives."""
    for name, leaf in actual.items():
        expected_part = expected[name]
        assert leaf.sharding == placement.param_sharding(f"backbone/{name}", expected_part.shape), (
            name
        )
        in_vocab = name in ("embed/word/table", "lm/table", "mlm/table", "mlm/bias")
        rows = placement.padded_vocab(VOCAB) if in_vocab else expected_part.shape[0]
        assert (
            leaf.shape == (rows, *expected_part.shape[1:]) and leaf.dtype == expected_part.dtype
        ), name
        values = np.asarray(leaf)
        assert values[: len(expected_part)].tobytes() == expected_part.tobytes(), name
        assert not values[len(expected_part) :].any(), name
        parts = [placement.mesh.shape[axis] for axis in leaf.sharding.spec if axis]
        for shard in leaf.addressable_shards:
            assert shard.data.nbytes * np.prod(parts, dtype=int) == leaf.nbytes, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
def test_every_device_holds_its_part(saved, family, dtype, placement):
    plain, sharded = (
        load_folder(saved / family, dtype=dtype, placement=p) for p in (None, placement)
    )
    flat, expected = tree.flatten(sharded.params), tree.flatten(plain.params)
    assert flat.keys() == expected.keys()
    assert all(isinstance(leaf, np.ndarray) for leaf in expected.values())
    assert_holds(flat, expected, placement)
    assert sharded.report == plain.report._replace(bytes=tree.count(flat) * leaf_size(flat))
    if placement.mesh.size > 1:
        assert any(not leaf.sharding.is_fully_replicated for leaf in flat.values())


def leaf_size(flat):
    return next(iter(flat.values())).dtype.itemsize


def test_torch_files(saved, tmp_path, placement):
    folder = tmp_path / "torch"
    files = [load_file(path) for path in (saved / "t5").glob("*.safetensors")]
    state = {name: torch.from_numpy(t) for tensors in files for name, t in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_bytes((saved / "t5" / "config.json").read_bytes())
    torch.save(state, folder / "pytorch_model.bin")
    plain, sharded = load_folder(saved / "t5"), load_folder(folder, placement=placement)
    assert sharded.report.fingerprint == plain.report.fingerprint
    assert_holds(tree.flatten(sharded.params), tree.flatten(plain.params), placement)


def test_blocks_may_be_of_any_size(saved, monkeypatch):
    """Blocks of one row or more, tiles that divide nothing, threads that get in the way."""
    placement = make_placement(2, 4, fsdp=True)
    expected = tree.flatten(load_folder(saved / "t5").params)
    for block, tile, threads in ((1, 3, 1), (200, 5, 3), (1000, 256, 8)):
        monkeypatch.setattr(weights, "_BLOCK_BYTES", block)
        monkeypatch.setattr(tensor_reader, "_TILE", tile)
        monkeypatch.setattr(tensor_reader, "_THREADS", threads)
        loaded, report = load_folder(saved / "t5", placement=placement)
        assert report.fingerprint == load_folder(saved / "t5").report.fingerprint
        assert_holds(tree.flatten(loaded), expected, placement)


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_no_byte_is_read_twice(saved, family, placement, count_bytes):
    report = load_folder(saved / family, placement=placement).report
    unused = (16 + 1) * 2 * 4 if family == "bert" else 0  # of the next-sentence head
    assert len(report.unused) == (2 if unused else 0)
    assert count_bytes() == stored_bytes(saved / family) - unused


def test_equal_shards_share_the_hosts_memory(saved):
    """A CPU's devices read the array that was filled."""
    flat = tree.flatten(load_folder(saved / "t5", placement=make_placement(8, 1)).params)
    for name, leaf in flat.items():
        places = {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        assert len(places) == 1, name


@pytest.mark.default_cases("model")
@pytest.mark.parametrize("mesh", ["model", "fsdp", "copies"])
def test_each_host_reads_its_shards_and_hashes_its_part(saved, tmp_path, mesh):
    """Rows of the file are read as they are needed; these are too short for part of one."""
    folder = saved / "t5"
    model, fsdp = {"model": (4, 0), "fsdp": (1, 1), "copies": (2, 0)}[mesh]
    with Processes(tmp_path, devices=2) as processes:
        processes.start_all(2, [JOB, folder, model, fsdp])
        codes = processes.wait()
        assert codes == [0, 0], processes.told()
        actual = [json.loads(processes.out(i)) for i in range(2)]
    plain, total = load_folder(folder), stored_bytes(folder)
    devices = jax.devices()[:4]
    whole = load_folder(
        folder, placement=make_placement(-1, model, fsdp=bool(fsdp), devices=devices)
    )
    for answer in actual:
        assert answer["fingerprint"] == plain.report.fingerprint
    for name, leaf in tree.flatten(whole.params).items():
        expected = hashes(leaf)
        first, second = (answer["shards"][name] for answer in actual)
        assert first.items() <= expected.items() and second.items() <= expected.items(), name
        assert first.keys() | second.keys() == expected.keys(), name
    reads = [answer["read"] for answer in actual]
    if mesh == "model":  # half of the tables, queries, keys, values and of the way up, once
        assert sum(reads) < 1.75 * total and max(reads) < 0.9 * total
    elif mesh == "fsdp":  # here what writes into the stream is needed by rows: o and wo
        assert sum(reads) < 1.9 * total
    else:
        assert reads == [total, total]


@pytest.mark.long
def test_other_weights_on_one_host_are_noticed(saved, tmp_path):
    """The two differ in one norm alone."""
    other = shutil.copytree(saved / "bert", tmp_path / "other")
    is_norm = lambda name: name.endswith("LayerNorm.weight")
    path = next(p for p in sorted(other.glob("*.safetensors")) if any(map(is_norm, load_file(p))))
    tensors = load_file(path)
    norm = next(filter(is_norm, tensors))
    save_file(tensors | {norm: tensors[norm] + 1}, path)
    with Processes(tmp_path, devices=2) as processes:
        processes.start_all(2, [JOB, f"{saved / 'bert'},{other}", 2, 0])
        assert all(processes.wait()), processes.told()
        for process in range(2):
            assert "the processes read different weights from" in processes.err(process)


@pytest.mark.long
def test_nan_that_one_host_reads_ends_both(saved, tmp_path):
    other = shutil.copytree(saved / "bert", tmp_path / "other")
    holds = lambda path: next((n for n in load_file(path) if n.endswith("query.weight")), None)
    path = next(p for p in sorted(other.glob("*.safetensors")) if holds(p))
    tensors, name = load_file(path), holds(path)
    tensors[name][0, 0] = np.nan
    save_file(tensors, path)
    with Processes(tmp_path, devices=2) as processes:
        processes.start_all(2, [JOB, other, 2, 0])
        assert all(processes.wait()), processes.told()
        for process in range(2):
            assert f"{name} in {path} contains NaN or infinity" in processes.err(process)
