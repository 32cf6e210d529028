"""An exported prompt reads back exactly, in other readers too; what is not whole is refused."""

import dataclasses
import errno
import hashlib
import json
import os

import numpy as np
import pytest
from exports import make_metadata

from jaxprompt.convert.artifact import (
    FORMAT,
    check_fingerprint,
    import_npy,
    read_artifact,
    write_artifact,
    write_npy,
)
from jaxprompt.errors import InputError
from jaxprompt.files import add_checksum

METADATA = make_metadata()
FINGERPRINT = METADATA.backbone.fingerprint


def make_tensors():
    rng = np.random.default_rng(0)
    return {
        "prompt/v": rng.normal(size=(2, 4, 3)).astype(np.float32),
        "prompt/k": rng.normal(size=(2, 4, 3)).astype(np.float32),
        "head/bias": rng.normal(size=5).astype(np.float16),
        "count": np.int32(7),
    }


def test_reads_back_exactly(tmp_path):
    tensors = make_tensors()
    paths = write_artifact(tmp_path / "a/b", tensors, METADATA)
    assert sorted(p.name for p in paths[0].parent.iterdir()) == [
        "prompt.json",
        "prompt.safetensors",
    ]
    for path in (tmp_path / "a/b", *paths):
        actual, metadata = read_artifact(path)
        assert actual.keys() == tensors.keys()
        for name, array in tensors.items():
            assert actual[name].dtype == array.dtype and actual[name].shape == array.shape
            assert actual[name].tobytes() == array.tobytes()
        digest = hashlib.sha256(paths[0].read_bytes()).hexdigest()
        assert metadata == dataclasses.replace(METADATA, sha256=digest)
        document = json.loads(paths[1].read_text())
        assert document.pop("format") == 1 and document.pop("checksum")
        assert document == metadata.to_json()


def test_bytes_depend_on_the_numbers_alone(tmp_path):
    tensors = make_tensors()
    # Other order of names, Fortran order, a strided view, the other byte order.
    shuffled = {name: tensors[name] for name in reversed(tensors)}
    shuffled["prompt/v"] = np.asfortranarray(shuffled["prompt/v"])
    shuffled["prompt/k"] = np.repeat(shuffled["prompt/k"], 2, axis=1)[:, ::2]
    swapped = {**shuffled, "count": np.asarray(7, dtype=">i4")}
    first, _ = write_artifact(tmp_path / "1", tensors, METADATA)
    for number, same in enumerate((tensors, shuffled, swapped), 2):
        again, _ = write_artifact(
            tmp_path / str(number), same, dataclasses.replace(METADATA, created="later")
        )
        assert again.read_bytes() == first.read_bytes()
    numbers = sum(array.nbytes for array in tensors.values())
    assert first.stat().st_size < numbers + 500


def test_failed_write_leaves_the_earlier_export(tmp_path, monkeypatch):
    write_artifact(tmp_path, make_tensors(), METADATA)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="cannot write .*No space left on device"):
        write_artifact(tmp_path, {"other": np.zeros(3)}, METADATA)
    monkeypatch.undo()
    assert read_artifact(tmp_path)[0].keys() == make_tensors().keys()
    assert len(list(tmp_path.iterdir())) == 2


def test_fingerprint():
    assert check_fingerprint(METADATA.backbone, FINGERPRINT, force=False)
    other = "0123456789abcdef0123456789abcdef"
    message = rf"{FINGERPRINT[:12]} \(owner/bert\), not on {other[:12]}; .*--force"
    with pytest.raises(InputError, match=message):
        check_fingerprint(METADATA.backbone, other, force=False)
    assert not check_fingerprint(METADATA.backbone, other, force=True)
    with pytest.raises(InputError, match=r"quantize='none', but .* quantize='int8'; use load_back"):
        check_fingerprint(METADATA.backbone, f"int8-{other}", force=False)


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("prompt.safetensors", lambda data: data[:-1], "is damaged, or from another export"),
        ("prompt.safetensors", None, "prompt.safetensors: No such file"),
        ("prompt.json", lambda data: data[: len(data) // 2], "not valid JSON"),
        ("prompt.json", lambda data: b'{"model_type": "bert"}', "has format None, .*; update jaxp"),
        ("prompt.json", lambda data: data.replace(b"good", b"food"), "is damaged or was edited"),
        ("prompt.json", None, "prompt.json cannot be read .*; give the folder that `export` wrote"),
    ],
)
def test_an_export_that_is_not_whole_is_refused(tmp_path, file, change, message):
    write_artifact(tmp_path, make_tensors(), METADATA)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    if change is not None:
        (tmp_path / file).write_bytes(change(data))
    with pytest.raises(InputError, match=message):
        read_artifact(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "float32"])
def test_tensors_that_numpy_does_not_read_are_refused(tmp_path, dtype):
    paths = write_artifact(tmp_path, make_tensors(), METADATA)
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0"
    paths[0].write_bytes(data)
    metadata = dataclasses.replace(METADATA, sha256=hashlib.sha256(data).hexdigest())
    document = add_checksum({"format": FORMAT, **metadata.to_json()})
    paths[1].write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"{paths[0]} cannot be read as numpy arrays"):
        read_artifact(tmp_path)


def test_the_folder_above_exports_names_them(tmp_path):
    for name in ("a", "b"):
        write_artifact(tmp_path / name, make_tensors(), METADATA)
    with pytest.raises(InputError, match=f"give {tmp_path / 'a'} or {tmp_path / 'b'}$"):
        read_artifact(tmp_path)


def test_metadata_may_have_another_layout(tmp_path):
    _, path = write_artifact(tmp_path, make_tensors(), METADATA)
    metadata = read_artifact(tmp_path)[1]
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert read_artifact(tmp_path)[1] == metadata


def test_npy_round_trip(tmp_path):
    prompt = np.random.default_rng(1).normal(size=(20, 8)).astype(np.float32)
    path = tmp_path / "prompt.npy"
    write_npy(path, np.asfortranarray(prompt))
    header = b"'descr': '<f4', 'fortran_order': False, 'shape': (20, 8)"
    assert header in path.read_bytes()
    np.testing.assert_array_equal(import_npy(path, 8), prompt)
    for dtype in (np.float16, np.float64, ">f4"):
        np.save(path, prompt.astype(dtype))
        vectors = import_npy(path, 8)
        assert vectors.dtype == np.float32
        np.testing.assert_array_equal(vectors, prompt.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((4, 9)), r"has shape \[4, 9\]; use \[length, 8\]"),
        (np.zeros(8), r"has shape \[8\]"),
        (np.zeros((0, 8)), r"has shape \[0, 8\]"),
        (np.zeros((4, 8), np.int64), "is not a single array of floats"),
        (np.full((4, 8), np.nan), "NaN or infinity"),
        (np.full((4, 8), 1e39), "NaN or infinity"),
        (np.array([{"code": 1}]), "cannot read .* save it with numpy.save"),
    ],
)
def test_npy_of_another_kind_is_refused(tmp_path, array, message):
    np.save(tmp_path / "prompt.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=message):
        import_npy(tmp_path / "prompt.npy", 8)


def test_files_that_are_no_npy_are_refused(tmp_path):
    path = tmp_path / "prompt.npy"
    with pytest.raises(InputError, match="cannot read .*No such file"):
        import_npy(path)
    for content in (b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="cannot read .*; save it with numpy.save"):
            import_npy(path)
    with open(path, "wb") as file:
        np.savez(file, prompt=np.zeros((4, 8)))
    with pytest.raises(InputError, match="is not a single array of floats"):
        import_npy(path)
