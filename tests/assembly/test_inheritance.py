"""What a prompt takes over from exports: their mean, cut or repeated to its length."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxprompt.assembly import inheritance
from jaxprompt.errors import InputError

CONFIG = SimpleNamespace(backbone=SimpleNamespace(rescale=1.0))
LABELS = ("no", "yes")


@pytest.fixture
def inherit(monkeypatch):
    """-> takes tensors (and changes of the card) of each export, and what was drawn"""

    def take(exports, drawn, labels=LABELS, config=CONFIG):
        known = {}
        for number, (tensors, changes) in enumerate(exports):
            backbone = {"fingerprint": "abc", "id": "tiny", "rescale": 1.0}
            card = {
                "backbone": backbone | changes.get("backbone", {}), "method": "soft",
                "prompt": {"name": "constant"}, "task": {"labels": ["no", "yes"]},
            }  # fmt: skip
            known[f"export{number}"] = {f"prompt/{n}": x for n, x in tensors.items()}, card
        monkeypatch.setattr(inheritance, "read_export", known.get)
        return inheritance.inherit(config, "abc", labels, ",".join(known), drawn)

    return take


def rows(*values):
    """Rows of two numbers, equal in each."""
    return np.repeat(np.float32(values)[:, None], 2, axis=1)


def test_several_exports_give_their_mean(inherit):
    """Neither the median nor the last: 0, 0 and 3 have the mean 1."""
    exports = [({"slots": rows(x, y)}, {}) for x, y in ((0, 1), (0, 5), (3, 9))]
    found = inherit(exports, {"table": rows(7, 7)})["table"]
    np.testing.assert_array_equal(found, rows(1, 5))
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    "length, expected", [(1, (4,)), (2, (4, 5)), (3, (4, 5, 6)), (5, (4, 5, 6, 4, 5))]
)
def test_tokens_are_cut_or_repeated_from_the_first(inherit, length, expected):
    found = inherit([({"slots": rows(4, 5, 6)}, {})], {"table": rows(*[0] * length)})
    np.testing.assert_array_equal(found["table"], rows(*expected))


def test_soft_tokens_are_scaled_as_the_embeddings_beside_them(inherit):
    """Embeddings of a backbone that is rescaled by 4 are a quarter of their size."""
    config = SimpleNamespace(backbone=SimpleNamespace(rescale=4.0))
    export = {"slots": rows(6, 8)}, {"backbone": {"rescale": 2.0}}
    found = inherit([export], {"table": rows(0, 0)}, config=config)
    np.testing.assert_array_equal(found["table"], rows(3, 4))


@pytest.mark.parametrize("labels, fits", [
    (("no", "yes"), True), (("no", "maybe"), True), (("no", "maybe", "sure"), True),
    (("yes", "no"), False), (("maybe", "no"), False),
])  # fmt: skip
def test_rows_of_classes_go_to_the_classes_that_they_are_of(inherit, labels, fits):
    """A class of both must stand in one place; new ones may take any that is free."""
    exports = [({"rows": rows(1, 2)}, {})]
    if fits:
        found = inherit(exports, {"rows": rows(0, 0)}, labels)
        np.testing.assert_array_equal(found["rows"], rows(1, 2))
    else:
        with pytest.raises(InputError, match="order them alike"):
            inherit(exports, {"rows": rows(0, 0)}, labels)


@pytest.mark.parametrize("tensors, changes, told", [
    ({"slots": rows(1)}, {"backbone": {"fingerprint": "xyz"}}, "was learned on weights xyz"),
    ({"slots": np.ones((1, 3), np.float32)}, {}, r"table is \[1, 3\], this run needs \[2, 2\]"),
    ({"k": np.ones((1, 1, 1, 1)), "v": np.ones((1, 1, 1, 1))}, {}, r"table is"),
])  # fmt: skip
def test_exports_of_other_weights_or_forms_are_refused(inherit, tensors, changes, told):
    with pytest.raises(InputError, match=told):
        inherit([(tensors, changes)], {"table": rows(0, 0)})
