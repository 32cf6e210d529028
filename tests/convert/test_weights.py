"""Reading tensors: every file layout gives the same numbers, every broken file one line."""

import errno
import json
import os
import pickle
import sys
from pathlib import Path

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
        for name in weights.names():
            array = weights.read(name)
            assert weights.shape(name) == array.shape
            assert weights.dtype(name) == array.dtype.name
        return {name: weights.read(name) for name in weights.names()}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert got[name].tobytes() == array.tobytes()


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
    assert_same(read_all(tmp_path), tensors)


def test_torch_files_of_the_earlier_format(tmp_path, tensors):
    path = tmp_path / "pytorch_model.bin"
    torch.save(as_torch(tensors), path, _use_new_zipfile_serialization=False)
    assert_same(read_all(tmp_path), tensors)


def test_torch_views_are_read_in_order(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    torch.save({"t": whole.T}, tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(read_all(tmp_path)["t"], np.arange(12.0).reshape(3, 4).T)


def test_safetensors_come_before_torch_files(tmp_path, tensors):
    save_shards(tmp_path, tensors, save_file, "model-{i}-of-{n}.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert_same(read_all(tmp_path), tensors)


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
    with pytest.raises(InputError, match="cannot be read as plain tensors") as caught:
        read_all(tmp_path)
    said = str(caught.value)
    assert "\n" not in said and "weights_only" not in said and "torch.load" not in said
    assert "pickled code, which is never run" in said and "safetensors" in said
    assert not harm.exists()


@pytest.mark.parametrize(
    "state",
    [
        {1: torch.zeros(2)},
        {"a": torch.zeros(2, 2).to_sparse()},
        {"a": torch.zeros(1, device="meta")},
        {"state_dict": {"a": torch.zeros(2)}},
    ],
)
def test_torch_tensors_that_are_not_plain(tmp_path, state):
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="not a dict of tensors"):
        read_all(tmp_path)


def test_a_name_that_a_header_has_twice(tmp_path):
    """The library checks one of the two, Python reads the other."""
    entry = '"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}'
    ends = ((10**9, 4 * 10**9), (2, 2**63), (3, 8))
    for size, end in ends:
        for pair in ((entry % (size, end), entry % (2, 8)), (entry % (2, 8), entry % (size, end))):
            header = ("{" + ",".join(pair) + "}").encode()
            (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
            with pytest.raises(InputError, match="corrupt or cut short .* download it again"):
                read_all(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-3],
        lambda data: data[:40],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"!" + data[9:],
        lambda data: b"<html>not found</html>",
    ],
    ids=["empty", "cut tail", "cut header", "huge header", "bad json", "web page"],
)
def test_damaged_safetensors_is_one_line(tmp_path, tensors, damage):
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / SINGLE).write_bytes(damage((tmp_path / SINGLE).read_bytes()))
    with pytest.raises(InputError, match="corrupt or cut short .* download it again") as caught:
        read_all(tmp_path)
    assert str(tmp_path / SINGLE) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 30, 200])
def test_damaged_torch_file_is_one_line(tmp_path, tensors, keep):
    path = tmp_path / "pytorch_model.bin"
    torch.save(as_torch(tensors), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="download it again") as caught:
        read_all(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_shard_is_named(tmp_path, tensors):
    save_shards(tmp_path, tensors, save_file, "model-{i}-of-{n}.safetensors")
    (tmp_path / "model-1-of-3.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"lists 'model-1-of-3\.safetensors', which is missing from"
    ):
        read_all(tmp_path)


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
def test_tensor_missing_from_its_shard_is_named(tmp_path, tensors, kind):
    """Also where another shard holds a tensor of that name."""
    to_file, save, pattern = LAYOUTS[kind]
    save_shards(tmp_path, to_file(tensors), save, pattern)
    save(to_file({"other": np.zeros(1, np.float32)}), tmp_path / pattern.format(i=1, n=3))
    save(to_file(tensors), tmp_path / pattern.format(i=2, n=3))
    with pytest.raises(
        InputError, match=rf"lists 'b\.weight' in {pattern.format(i=1, n=3)}, which"
    ):
        read_all(tmp_path)


def test_an_index_that_names_two_shards_for_a_tensor(tmp_path, tensors):
    save_shards(tmp_path, tensors, save_file, "model-{i}-of-{n}.safetensors")
    twice = '{"weight_map": {"a.weight": "model-0-of-3.safetensors", "a.weight": "other"}}'
    (tmp_path / INDEX).write_text(twice)
    with pytest.raises(InputError, match="'a.weight' appears twice"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "outside its folder"),
        ({"weight_map": ["a"]}, "no valid 'weight_map'"),
        ({}, "no valid 'weight_map'"),
    ],
)
def test_bad_index(tmp_path, index, message):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        read_all(tmp_path)


def test_no_weights_at_all(tmp_path):
    (tmp_path / "tf_model.h5").write_bytes(b"")
    with pytest.raises(InputError, match="neither model.safetensors nor pytorch_model.bin"):
        read_all(tmp_path)


@pytest.mark.parametrize("call", ["open", "iterdir"])
def test_no_permission_is_one_line(tmp_path, tensors, monkeypatch, call):
    """Raised by hand: the user who runs the tests may be allowed to read everything."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    save_file(tensors, tmp_path / SINGLE)
    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\); check"):
        read_all(tmp_path)


@pytest.mark.parametrize("kind", ["absent", "file", "folder as weights"])
def test_paths_of_the_wrong_kind_are_one_line(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "file":
        path.write_bytes(b"")
    if kind == "folder as weights":
        (path / SINGLE).mkdir(parents=True)
    with pytest.raises(InputError, match="cannot be read .*; check") as caught:
        read_all(path)
    assert "\n" not in str(caught.value)


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


def test_a_file_cut_short_while_it_is_read_is_one_line(tmp_path, tensors):
    save_file(tensors, tmp_path / SINGLE)
    with open_weights(tmp_path) as weights:
        os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 60)
        with pytest.raises(InputError, match="was cut short while it was read; download") as caught:
            for name in weights.names():
                weights.read(name)
    assert str(tmp_path / SINGLE) in str(caught.value)


def test_a_broken_link_is_to_be_downloaded_again(tmp_path):
    (tmp_path / SINGLE).symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be read .*; it is a broken link: download it ag"):
        with open_weights(tmp_path):
            pass


def test_a_disk_that_fails_is_one_line(tmp_path, tensors, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    save_file(tensors, tmp_path / SINGLE)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InputError, match=r"cannot be read \(Input/output error\); check"):
        read_all(tmp_path)
