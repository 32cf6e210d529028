"""What a prompt takes over from exports: their mean, cut or repeated to its length."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from exports import make_metadata

from jaxprompt.build import inheritance
from jaxprompt.convert.prompt_metadata import OriginMetadata
from jaxprompt.errors import InputError
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Dims

CONFIG = SimpleNamespace(backbone=SimpleNamespace(rescale=1.0))
LABELS = ("no", "yes")


@pytest.fixture
def inherit(monkeypatch):
    """-> takes tensors (and changes of the backbone) of each export, and what was drawn"""

    def take(exports, random_params, labels=LABELS, config=CONFIG):
        cache = {}
        for number, (tensors, changes) in enumerate(exports):
            backbone = {"fingerprint": "abc", "id": "tiny"} | changes
            metadata = make_metadata(
                backbone=backbone, method="soft", task={"labels": ["no", "yes"]}
            )
            cache[f"export{number}"] = {f"prompt/{n}": x for n, x in tensors.items()}, metadata
        monkeypatch.setattr(inheritance, "read_export", cache.get)
        return inheritance.inherit_prompt(config, "abc", labels, ",".join(cache), random_params)

    return take


def rows(*values):
    """Rows of two numbers, equal in each."""
    return np.repeat(np.float32(values)[:, None], 2, axis=1)


@pytest.mark.parametrize("values, mean", [
    ([(0, 1), (0, 5), (3, 9)], (1, 5)), ([(0, 1), (4, 3)], (2, 2)), ([(6, 1)], (6, 1)),
])  # fmt: skip
def test_several_exports_give_their_mean(inherit, values, mean):
    """Neither the median nor the last: 0, 0 and 3 have the mean 1."""
    exports = [({"slots": rows(x, y)}, {}) for x, y in values]
    inherited = inherit(exports, {"table": rows(7, 7)})["table"]
    np.testing.assert_array_equal(inherited, rows(*mean))
    assert inherited.dtype == np.float32


@pytest.mark.parametrize(
    "length, expected", [(1, (4,)), (2, (4, 5)), (3, (4, 5, 6)), (5, (4, 5, 6, 4, 5))]
)
def test_tokens_are_cut_or_repeated_from_the_first(inherit, length, expected):
    inherited = inherit([({"slots": rows(4, 5, 6)}, {})], {"table": rows(*[0] * length)})
    np.testing.assert_array_equal(inherited["table"], rows(*expected))


def test_soft_tokens_are_scaled_as_the_embeddings_beside_them(inherit):
    """Embeddings of a backbone that is rescaled by 4 are a quarter of their size."""
    config = SimpleNamespace(backbone=SimpleNamespace(rescale=4.0))
    export = {"slots": rows(6, 8)}, {"rescale": 2.0}
    inherited = inherit([export], {"table": rows(0, 0)}, config=config)
    np.testing.assert_array_equal(inherited["table"], rows(3, 4))


@pytest.mark.parametrize("labels, fits", [
    (("no", "yes"), True), (("no", "maybe"), True), (("no", "maybe", "sure"), True),
    (("yes", "no"), False), (("maybe", "no"), False),
])  # fmt: skip
def test_rows_of_classes_go_to_the_classes_that_they_are_of(inherit, labels, fits):
    """A class of both must stand in one place; new ones may take any that is free."""
    exports = [({"rows": rows(1, 2)}, {})]
    if fits:
        inherited = inherit(exports, {"rows": rows(0, 0)}, labels)
        np.testing.assert_array_equal(inherited["rows"], rows(1, 2))
    else:
        with pytest.raises(InputError, match="use the same order"):
            inherit(exports, {"rows": rows(0, 0)}, labels)


@pytest.mark.parametrize("tensors, changes, message", [
    ({"slots": rows(1)}, {"fingerprint": "xyz"}, "was trained on the weights xyz"),
    ({"slots": np.ones((1, 3), np.float32)}, {}, r"table is \[1, 3\], but this run needs \[2, 2\]"),
    ({"k": np.ones((1, 1, 1, 1)), "v": np.ones((1, 1, 1, 1))}, {}, r"table is"),
])  # fmt: skip
def test_exports_of_other_weights_or_forms_are_refused(inherit, tensors, changes, message):
    with pytest.raises(InputError, match=message):
        inherit([(tensors, changes)], {"table": rows(0, 0)})


# -- what fits -------------------------------------------------------------------------------------

DIMS = Dims(vocab=53, width=16, embed=16, layers=4, heads=2, head_dim=8, max_len=60)
T5_DIMS = DIMS._replace(decoder_layers=2)


def check_export(monkeypatch, method, exported, dims, **changes):
    """Checks an export of `held` where `method` is to start from it."""
    backbone = {"dims": dims._asdict() | changes, "id": "tiny"}
    metadata = make_metadata(
        method=exported.block()["name"], hyper=exported.block(), backbone=backbone
    )
    monkeypatch.setattr(inheritance, "read_export", lambda path: ({}, metadata))
    return inheritance._check_export("export", method, dims)


@pytest.mark.parametrize("dims, fields, exported, message", [
    (DIMS, dict(length=2), dict(length=5, scale=0.5, start="uniform"), None),
    (T5_DIMS, dict(length=2, decoder=1), dict(length=2, decoder=1), None),
    (T5_DIMS, dict(length=2, decoder=1), dict(length=3, decoder=1), "prompt.length=3, but this"),
    (T5_DIMS, dict(length=2), dict(length=3, decoder=1), "has prompt.length=3, but this run has 2"),
])  # fmt: skip
def test_the_length_may_differ_where_all_tokens_are_of_one_stream(
    monkeypatch, dims, fields, exported, message
):
    prompt, other = (make_prompt("soft", dims, **x) for x in (fields, exported))
    if message is None:
        assert check_export(monkeypatch, prompt, other, dims).method == "soft"
    else:
        with pytest.raises(InputError, match=message):
            check_export(monkeypatch, prompt, other, dims)


def test_exports_of_other_methods_fields_and_backbones_are_refused(monkeypatch):
    prefix = make_prompt("prefix", DIMS, length=2)
    soft, still = make_prompt("soft", DIMS), make_prompt("prefix", DIMS, length=2, shift=False)
    computed = make_prompt("prefix", DIMS, length=2, hidden=4)
    composed = make_prompt("compose", DIMS, parts="soft(length=2)+prefix(length=2)")
    check_export(monkeypatch, prefix, prefix, DIMS, vocab=99, max_len=99)  # these may differ
    for fields, exported, changes, message in (
        (prefix, soft, {}, "contains a prompt of method soft"),
        (prefix, still, {}, "has prompt.shift=False, but this run has True"),
        (prefix, prefix, {"layers": 5}, "is for a backbone with layers=5"),
        (computed, prefix, {}, "set prompt.hidden=0"),
        (composed, composed, {}, "set init= of each of prompt.parts"),
    ):
        with pytest.raises(InputError, match=message):
            check_export(monkeypatch, fields, exported, DIMS, **changes)


@pytest.mark.parametrize("init, parts, tensors, name, message", [
    ("a", False, ("head/out/bias",), "linear", None),
    ("a", False, (), "linear", "has head.name=linear without params"),
    ("a", False, ("head/out/bias",), "spans", "has head.name=spans and this run linear"),
    ("a, b", False, (), "linear", "names 2; name one"),
    ("", False, (), "linear", "names 0; name one"),
    ("", True, (), "linear", "not from that of a component"),
])  # fmt: skip
def test_a_head_starts_from_the_one_export_that_has_it(
    monkeypatch, init, parts, tensors, name, message
):
    export = dict.fromkeys(tensors), make_metadata(head={"name": name})
    monkeypatch.setattr(inheritance, "read_export", lambda path: export)
    monkeypatch.setattr(inheritance, "inherited_exports", lambda c: [("part", None)] * parts)
    config = SimpleNamespace(prompt={"init": init}, head=SimpleNamespace(name="linear"))
    if message is None:
        inheritance._check_head(config)
    else:
        with pytest.raises(InputError, match=message):
            inheritance._check_head(config)


def test_an_export_says_what_it_came_from(monkeypatch):
    metadata = make_metadata(seed=3, sha256="abc", pretrained={"task": "nsp"})
    monkeypatch.setattr(inheritance, "read_export", lambda path: ({}, metadata))
    values = metadata.to_json()
    expected = {"path": "runs/a"} | {name: values[name] for name in ("method", "task", "seed")}
    expected |= {"metrics": values["metrics"], "created": values["created"], "sha256": "abc"}
    expected |= {"task": "news", "pretrained": {"task": "nsp"}}
    origin = inheritance.origin_metadata("runs/a")
    assert json.dumps(origin.to_json()) == json.dumps(expected)
    assert OriginMetadata.from_json(origin.to_json(), "record.json") == origin
