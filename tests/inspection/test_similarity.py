"""Exported prompts are compared by their mean tokens, if they are of one kind."""

import numpy as np
import pytest
from exports import make_metadata

from jaxprompt.errors import InputError
from jaxprompt.inspection import similarity

CONSTANT = {"name": "constant", "length": 2, "first": 0, "last": 1, "shift": 2}
SLOTS = {"b/c": [[0.0, 2.0], [0.0, 0.0]], "a": [[3.0, 0.0], [0.0, 3.0], [0.0, 3.0]], "z": [[1, 0]]}


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Compares exports of these tensors and metadata by the names of their folders."""

    def call(exports):
        for name in exports:
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "prompt.json").touch()
        read = lambda path: exports[path.removeprefix(f"{tmp_path}/")]
        monkeypatch.setattr(similarity, "read_export", read)
        return similarity.compare_exports(str(tmp_path))

    return call


def test_cosines_are_those_of_the_mean_tokens(compare):
    metadata = make_metadata(method="soft")
    actual = compare({name: ({"prompt/slots": np.array(x)}, metadata) for name, x in SLOTS.items()})
    assert actual.names == ["a", "b/c", "z"]
    a, b, z = (np.mean(SLOTS[name], 0) for name in actual.names)
    cosine = lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    expected = [[cosine(x, y) for y in (a, b, z)] for x in (a, b, z)]
    np.testing.assert_allclose(actual.cosines, expected, atol=1e-12)
    assert similarity.format_pairs(actual) == " 0.8944  a  b/c\n 0.4472  a  z\n 0.0000  b/c  z\n"


def test_a_prefix_has_a_mean_key_and_value_in_each_layer():
    k, v = np.arange(12.0).reshape(2, 3, 1, 2), np.ones((2, 3, 1, 2))
    mean = similarity.mean_token({"prompt/k": k, "prompt/v": v, "prompt/rows": np.ones((2, 2))})
    assert mean.tolist() == [2, 3, 8, 9, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "changes, width, message",
    [
        ({"prompt": {"first": 1, "last": 2}}, 2, "has layers 2-2, .*a has 1-1; give prompts"),
        ({"method": "constant"}, 2, "has method constant, .*a has prefix"),
        ({"backbone": {"fingerprint": "1" * 64}}, 2, "has backbone 111111111111, .*a has 53aa"),
        ({}, 3, "has values per token 3, .*a has 2"),
        ({}, 0, "contains a prompt of prefix without tokens"),
    ],
)  # fmt: skip
def test_prompts_of_other_kinds_are_not_compared(compare, changes, width, message):
    """Even if they are as wide."""
    changed = {"prompt": CONSTANT} | changes
    changed["prompt"] = CONSTANT | changed["prompt"]
    tensors = {"prompt/slots": np.ones((2, width))} if width else {}
    first = {"prompt/slots": np.ones((2, 2))}, make_metadata(prompt=CONSTANT)
    with pytest.raises(InputError, match=message):
        compare({"a": first, "b": (tensors, make_metadata(**changed))})


def test_one_export_is_not_compared(compare):
    with pytest.raises(InputError, match="contains 1 exports"):
        compare({"a": ({"prompt/slots": np.ones((2, 2))}, make_metadata())})
