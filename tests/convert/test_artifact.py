"""An exported prompt reads back exactly, in other readers too; what is not whole is refused."""

import dataclasses
import errno
import hashlib
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from exports import make_metadata

from jaxprompt.convert.artifact import (
    check_fingerprint,
    import_npy,
    read_artifact,
    write_artifact,
    write_npy,
)
from jaxprompt.errors import InputError
from jaxprompt.files import json_checksum

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


def with_checksum(values):
    return values | {"checksum": json_checksum(values)}


def refused(path):
    with pytest.raises(InputError) as error:
        read_artifact(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_folder_above_an_export_names_that_in_it(tmp_path):
    write_artifact(tmp_path / "run" / "export", make_tensors(), METADATA)
    assert f"use {tmp_path / 'run' / 'export'}, which exists" in refused(tmp_path / "run")


def test_reads_back_exactly(tmp_path):
    tensors = make_tensors()
    paths = write_artifact(tmp_path / "a/b", tensors, METADATA)
    assert sorted(p.name for p in paths[0].parent.iterdir()) == [
        "prompt.json",
        "prompt.safetensors",
    ]
    for path in (tmp_path / "a/b", *paths):
        found, metadata = read_artifact(path)
        assert found.keys() == tensors.keys()
        for name, array in tensors.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes()
        digest = hashlib.sha256(paths[0].read_bytes()).hexdigest()
        assert metadata == dataclasses.replace(METADATA, sha256=digest)
        document = json.loads(paths[1].read_text())
        assert document.pop("format") == 1 and document.pop("checksum")
        assert document == metadata.to_json()


def test_torch_reads_the_same_numbers(tmp_path):
    torch_reader = pytest.importorskip("safetensors.torch")
    tensors = make_tensors()
    path, _ = write_artifact(tmp_path, tensors, METADATA)
    for name, tensor in torch_reader.load_file(path).items():
        np.testing.assert_array_equal(tensor.numpy(), tensors[name])


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


def test_tensors_are_numbers(tmp_path):
    for array in (np.array([None]), np.array(["a"]), np.zeros(3, ml_dtypes.bfloat16)):
        with pytest.raises(ValueError, match=f"not {array.dtype}"):
            write_artifact(tmp_path, {"x": array}, METADATA)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_whole_are_refused(tmp_path):
    tensors, metadata = write_artifact(tmp_path, make_tensors(), METADATA)
    data, text = tensors.read_bytes(), metadata.read_text()

    (header,) = struct.unpack("<Q", data[:8])
    broken = [b"", data[:5], data[: len(data) // 2], data[:-1], data + b"x"]
    broken += [struct.pack("<Q", header * 10**6) + data[8:], data[:8] + b"?" + data[9:], b"PK" * 99]
    for content in broken:
        tensors.write_bytes(content)
        assert "is not a complete safetensors file" in refused(tmp_path)
    tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "and prompt.json are from different exports" in refused(tmp_path)
    tensors.unlink()
    assert "prompt.safetensors: No such file" in refused(tmp_path)
    tensors.write_bytes(data)

    for content in ("", text[: len(text) // 2], "\x00\xff"):
        metadata.write_text(content)
        assert "is not complete JSON" in refused(tmp_path)
    for content in ("[]", "{}", '{"model_type": "bert"}'):
        metadata.write_text(content)
        assert "does not contain the metadata of a prompt" in refused(tmp_path)
    whole = json.loads(text)
    metadata.write_text(json.dumps(with_checksum({**whole, "format": 2})))
    assert "has format 2, but this version reads format 1; update jaxprompt" in refused(tmp_path)
    for name in ("template", "checksum"):
        fields = {k: v for k, v in whole.items() if k not in (name, "checksum")}
        metadata.write_text(json.dumps(fields if name == "checksum" else with_checksum(fields)))
        assert f"{name} is missing; export the prompt again" in refused(tmp_path)
    metadata.unlink()
    assert "prompt.json: No such file" in refused(tmp_path)
    assert "cannot read" in refused(tmp_path / "absent")


def test_metadata_with_a_flipped_bit_are_refused(tmp_path):
    """One that makes "good" of "food", say; the layout of the JSON may change."""
    _, path = write_artifact(tmp_path, make_tensors(), METADATA)
    data, metadata = path.read_bytes(), read_artifact(tmp_path)[1]
    refusals = 0
    for place, byte in enumerate(data):
        path.write_bytes(data[:place] + bytes([byte ^ 1 << place % 8]) + data[place + 1 :])
        try:
            assert read_artifact(tmp_path)[1] == metadata
        except InputError:
            refusals += 1
    assert refusals > 0.9 * len(data)
    edited = json.loads(data) | {"template": "another"}
    path.write_text(json.dumps(edited))
    assert "is damaged or was edited: its contents do not" in refused(tmp_path)
    path.write_text(json.dumps(json.loads(data), sort_keys=True))
    assert read_artifact(tmp_path)[1] == metadata
    # A change on purpose is written with a new checksum.
    write_artifact(tmp_path, make_tensors(), dataclasses.replace(metadata, template="another"))
    assert read_artifact(tmp_path)[1].template == "another"


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


def test_npy_round_trip(tmp_path):
    prompt = np.random.default_rng(1).normal(size=(20, 8)).astype(np.float32)
    path = tmp_path / "prompt.npy"
    write_npy(path, np.asfortranarray(prompt))
    data = path.read_bytes()
    assert data[:8] == b"\x93NUMPY\x01\x00"
    assert b"'descr': '<f4', 'fortran_order': False, 'shape': (20, 8)" in data
    assert data[-prompt.nbytes :] == prompt.tobytes()
    np.testing.assert_array_equal(import_npy(path, 8), prompt)
    for dtype in (np.float16, np.float64, ">f4"):
        np.save(path, prompt.astype(dtype))
        found = import_npy(path, 8)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, prompt.astype(dtype).astype(np.float32))


def test_npy_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "prompt.npy"

    def refusal():
        with pytest.raises(InputError) as error:
            import_npy(path, 8)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "No such file" in refusal()
    for content in (b"", b"hello", b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        assert "save it with numpy.save" in refusal()
    np.save(path, np.zeros((4, 8)))
    path.write_bytes(path.read_bytes()[:-8])
    assert "save it with numpy.save" in refusal()
    np.save(path, np.array([{"code": 1}]), allow_pickle=True)
    assert "save it with numpy.save" in refusal()
    for shape in ((4, 9), (8,), (1, 4, 8), (0, 8)):
        np.save(path, np.zeros(shape))
        assert f"has shape {list(shape)}; this backbone needs [length, 8]" in refusal()
    np.save(path, np.zeros((4, 8), np.int64))
    assert "has dtype int64" in refusal()
    for value in (np.nan, 1e39):
        np.save(path, np.full((4, 8), value))
        assert "NaN or infinity" in refusal()
    with open(path, "wb") as file:
        np.savez(file, prompt=np.zeros((4, 8)))
    assert "is an .npz archive" in refusal()
