"""Reading tensors: every file layout gives the same numbers, every broken file one line."""

import json
import os
import pickle
import re
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxprompt.convert.weights import open_weights
from jaxprompt.errors import InputError

torch = pytest.importorskip("torch")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "b.weight": rng.normal(size=(2, 3, 4)).astype(np.float16),
        "c.bias": rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
    }


def read_all(folder):
    with open_weights(folder) as weights:
        for name in weights.entries:
            array = weights.read(name)
            assert weights.entries[name].shape == array.shape
            assert weights.entries[name].dtype == array.dtype.name
        return {name: weights.read(name) for name in weights.entries}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].tobytes() == array.tobytes()


def save_shards(folder, tensors, save, pattern):
    """Writes one tensor a file and the index."""
    where = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        where[name] = pattern.format(i=i, n=len(tensors))
        save({name: tensor}, folder / where[name])
    single = pattern.replace("-{i}-of-{n}", "")
    (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": where}))


def as_torch(tensors):
    to = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return {
        name: torch.from_numpy(t.astype(np.float32)).to(to[t.dtype.name])
        for name, t in tensors.items()
    }


LAYOUTS = {
    "safetensors": (dict, save_file, "model-{i}-of-{n}.safetensors"),
    "torch": (as_torch, torch.save, "pytorch_model-{i}-of-{n}.bin"),
}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_has_the_same_tensors(tmp_path, tensors, kind, is_sharded):
    to_file, save, pattern = LAYOUTS[kind]
    if is_sharded:
        save_shards(tmp_path, to_file(tensors), save, pattern)
    else:
        save(to_file(tensors), tmp_path / pattern.replace("-{i}-of-{n}", ""))
    if kind == "safetensors":  # they take precedence
        (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert_same(read_all(tmp_path), tensors)


def test_torch_files_of_the_earlier_format(tmp_path, tensors):
    path = tmp_path / "pytorch_model.bin"
    torch.save(as_torch(tensors), path, _use_new_zipfile_serialization=False)
    assert_same(read_all(tmp_path), tensors)


def test_torch_views_are_read_in_order(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    torch.save({"t": whole.T}, tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(read_all(tmp_path)["t"], np.arange(12.0).reshape(3, 4).T)


def test_torch_file_without_torch_says_the_cure(tmp_path, monkeypatch):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="pip install torch, or convert the folder to safetensors"):
        read_all(tmp_path)


class Payload:
    """Unpickles by making a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("plain_pickle", [True, False])
def test_code_in_a_torch_file_never_runs(tmp_path, plain_pickle):
    harm = tmp_path / "harm"
    state = {"a": Payload(str(harm))}
    path = tmp_path / "pytorch_model.bin"
    if plain_pickle:
        path.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, path)
    with pytest.raises(InputError, match="pickled code, which is never run"):
        read_all(tmp_path)
    assert not harm.exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_each_tensor_is_read_from_the_shard_that_the_index_names(tmp_path, tensors, kind):
    """Other shards hold older copies, and so does a file that the index does not name."""
    to_file, save, pattern = LAYOUTS[kind]
    save_shards(tmp_path, to_file(tensors), save, pattern)
    stale = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    for i, name in enumerate(tensors):
        shard = stale | {name: tensors[name], "unlisted": np.ones(2, np.float32)}
        save(to_file(shard), tmp_path / pattern.format(i=i, n=3))
    save(to_file(stale), tmp_path / pattern.format(i=9, n=3))
    assert_same(read_all(tmp_path), tensors)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_blocks_are_parts_of_the_matrix(tmp_path, tensors, kind):
    tensors["wide.weight"] = np.arange(4 * 3000, dtype=np.float32).reshape(4, 3000)
    if kind == "torch":
        torch.save(as_torch(tensors), tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / SINGLE)
    with open_weights(tmp_path) as weights:
        assert weights.matrix("b.weight") == (6, 4) and weights.matrix("c.bias") == (1, 7)
        for name, tensor in tensors.items():
            matrix = tensor.reshape(weights.matrix(name))
            for rows in (slice(0, 1), slice(1, len(matrix)), slice(0, len(matrix))):
                for columns in (slice(0, 4), slice(1, 3), slice(1000, 2500)):
                    if columns.stop > matrix.shape[1]:
                        continue
                    block = weights.read_block(name, rows, columns)
                    assert block.flags.c_contiguous and block.dtype == tensor.dtype
                    np.testing.assert_array_equal(block, matrix[rows, columns])


def test_only_the_bytes_of_a_block_are_read(tmp_path, monkeypatch):
    """To whole rows, where the part of a row is less than a page."""
    save_file({"t": np.zeros((10, 3000), np.float32)}, tmp_path / SINGLE)
    read, sizes = os.preadv, []

    def count(*words):
        sizes.append(read(*words))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", count)
    cases = ((slice(0, 3000), [36_000]), (slice(9, 1033), [4096] * 3), (slice(9, 1032), [36_000]))
    with open_weights(tmp_path) as weights:
        for columns, expected in cases:
            sizes.clear()
            weights.read_block("t", slice(2, 5), columns)
            assert sizes == expected


@pytest.mark.parametrize("keep", [0, 40, -3])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_damaged_file_is_named(tmp_path, tensors, kind, keep):
    to_file, save, pattern = LAYOUTS[kind]
    path = tmp_path / pattern.replace("-{i}-of-{n}", "")
    save(to_file(tensors), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=f"{path} .* download it again") as caught:
        read_all(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_torch_file_of_another_kind_is_refused(tmp_path):
    torch.save({"state_dict": {"a": torch.zeros(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="not a dict of tensors"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    "shard", ["model-1-of-3.safetensors", "../model-0-of-3.safetensors", "x" * 300]
)
def test_a_shard_that_is_missing_or_in_another_folder_is_named(tmp_path, tensors, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    save_shards(folder, tensors, save_file, "model-{i}-of-{n}.safetensors")
    (folder / "model-1-of-3.safetensors").unlink()
    (folder / "model-0-of-3.safetensors").rename(tmp_path / "model-0-of-3.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(InputError, match=f"lists '{shard:.79}.*, which is missing from its folder"):
        read_all(folder)


@pytest.mark.parametrize("files", [["a"], "a", 5, {"a": 5}, {"a": None, "b": "c"}])
def test_an_index_of_another_structure_is_refused(tmp_path, files):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(InputError, match=re.escape(f"weight_map={files!r}")):
        read_all(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path, tensors):
    """Also where another shard holds a tensor of that name."""
    save_shards(tmp_path, tensors, save_file, "model-{i}-of-{n}.safetensors")
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "model-1-of-3.safetensors")
    save_file(tensors, tmp_path / "model-2-of-3.safetensors")
    with pytest.raises(InputError, match=r"lists 'b\.weight' in model-1-of-3.safetensors, which"):
        read_all(tmp_path)


def test_a_folder_without_weights_or_with_a_broken_link_is_named(tmp_path):
    (tmp_path / "tf_model.h5").write_bytes(b"")
    with pytest.raises(InputError, match="neither model.safetensors nor pytorch_model.bin"):
        read_all(tmp_path)
    (tmp_path / SINGLE).symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"model.safetensors cannot be read \(No such file"):
        read_all(tmp_path)


def test_a_file_cut_short_while_it_is_read_is_one_line(tmp_path, tensors):
    save_file(tensors, tmp_path / SINGLE)
    with open_weights(tmp_path) as weights:
        os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 60)
        with pytest.raises(InputError, match="was cut short while it was read; download") as caught:
            for name in weights.entries:
                weights.read(name)
    assert str(tmp_path / SINGLE) in str(caught.value)
