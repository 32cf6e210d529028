"""Several methods at once: laid side by side, numbered as their template has them, and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_equal, draw_params, make_batch

from jaxprompt.errors import InputError
from jaxprompt.layers.side_by_side import check_prefixes_agree
from jaxprompt.prompts import InitSource, make_prompt, read_parts
from jaxprompt.types import Batch, Dims, Role, TaskInfo, Tokens

DIMS = Dims(vocab=53, width=16, embed=16, layers=4, heads=2, head_dim=8, max_len=60)
T5_DIMS = DIMS._replace(decoder_layers=3)
ASKS = TaskInfo(3, (((11,),), ((21, 22),), ((31,),)), 4)


def compose(parts, dims=DIMS, task_info=ASKS):
    return make_prompt("compose", dims, task_info, parts=parts)


def injected(prompt, batch, **options):
    """Draws numbers and adds them. -> params, what is added"""
    embed = jnp.zeros((53, 16))
    params = draw_params(prompt, batch, embed, deterministic=True)
    options = {"deterministic": True} | options
    return params, prompt.apply({"params": params}, batch, embed, **options)


@pytest.mark.parametrize(
    "text, actual",
    [
        ("soft", [("soft", {})]),
        ("soft + prefix", [("soft", {}), ("prefix", {})]),
        (
            "soft(length=4,start=labels)+prefix( length=2, dropout=0.1,shift=False )+soft",
            [("soft", dict(length=4, start="labels")),
             ("prefix", dict(length=2, dropout=0.1, shift=False)), ("soft", {})],
        ),
        ("soft(text='It was + (so)',scale=-1)", [("soft", dict(text="It was + (so)", scale=-1))]),
    ],
)  # fmt: skip
def test_parts_are_read(text, actual):
    assert read_parts(text) == actual


@pytest.mark.parametrize(
    "text",
    ["", "+", "soft+", "soft(3)", "soft-prefix", "soft(length=)", "soft(**x)", "soft(length=a+b)",
     "x.y(length=1)", "soft(length=1)prefix", "3", "soft(length=f(2))", "soft(length={[]: 1})"],
)  # fmt: skip
def test_what_are_no_parts_is_refused(text):
    with pytest.raises(InputError, match="cannot be read; use methods and their fields") as error:
        read_parts(text)
    assert "\n" not in str(error.value)


@pytest.mark.long_cases("prefix-fields1")
@pytest.mark.parametrize("name, fields", [
    ("soft", ("length", "decoder")), ("prefix", ("length", "decoder", "cross")),
])  # fmt: skip
def test_two_tables_are_one(name, fields):
    """Of soft tokens, of an input and of a decoder, and of prefixes in three attentions."""
    sizes = [dict(zip(fields, lengths, strict=False)) for lengths in ((2, 1, 3), (3, 2, 1))]
    parts = [f"{name}({','.join(f'{f}={n}' for f, n in lengths.items())})" for lengths in sizes]
    prompt = compose("+".join(parts), T5_DIMS)
    batch = make_batch(rows=5, shift=3)
    params, actual = injected(prompt, batch)
    assert params.keys() == {name, f"{name}-2"}
    totals = {field: sizes[0][field] + sizes[1][field] for field in fields}
    whole = make_prompt(name, T5_DIMS, **totals)
    if name == "soft":
        first, second = (params[part]["table"] for part in params)
        table = {"table": np.concatenate([first[:2], second[:3], first[2:], second[3:]])}
    else:
        table = {
            table: np.concatenate([part[table] for part in params.values()], axis=2)
            for table in ("table", "decoder_table", "cross_table")
        }
    embed = jnp.zeros((53, 16))
    expected = whole.apply({"params": table}, batch, embed, deterministic=True)
    jax.tree.map(assert_equal, actual, expected)
    for counter in ("num_slots", "num_decoder_slots", "position_shift", "decoder_shift"):
        assert getattr(prompt, counter)() == getattr(whole, counter)()
    assert (actual.encoder.prefix is None) == (name == "soft")


@pytest.mark.long
def test_a_part_that_drops_is_drawn_for_every_example():
    prompt = compose("prefix(length=2,dropout=0.5)+prefix(length=1)")
    batch = make_batch(rows=5, shift=3)
    _, actual = injected(prompt, batch, deterministic=False, rngs={"dropout": jax.random.key(1)})
    k = actual.encoder.prefix.k
    assert k.shape[1:3] == (5, 3) and actual.encoder.prefix.mask.shape == (4, 1, 3)
    assert (k[:, :1, :2] != k[:, 1:2, :2]).any() and (k[:, :1, 2:] == k[:, 1:2, 2:]).all()


@pytest.mark.long_cases("soft(length=2)+dart(length=3,fluency=1.0)-2-5")
@pytest.mark.parametrize(
    "parts, before, count",
    [
        ("soft(length=2)+dart(length=3,fluency=1.0)", 2, 5),
        ("dart(length=3,fluency=1.0)+prefix(length=2)+soft(length=4)", 0, 7),
    ],
)
def test_the_view_of_a_part_names_its_own_rows(parts, before, count):
    """At the mask stands the row of the right label, whatever stands in front of it."""
    prompt = compose(parts)
    batch = make_batch(rows=6, slots=count, classes=3)
    params, actual = injected(prompt, batch)
    assert actual.encoder.slots.shape == (1, count + 3, 16) and prompt.num_slots() == count
    dart_params = params["dart"]
    assert_equal(actual.rows, dart_params["rows"])
    assert_equal(actual.encoder.slots[0, before : before + 3], dart_params["table"])
    (term,) = prompt.objectives()
    view = term.view(batch, jax.random.key(0))
    at = np.arange(6), np.asarray(batch.label_pos)[:, 0]
    rows = actual.encoder.slots[0][np.asarray(view.encoder.slot)[at]]
    assert_equal(rows, dart_params["rows"][np.asarray(batch.labels)])
    others = np.ones(batch.encoder.slot.shape, bool)
    others[at] = False
    assert_equal(view.encoder.slot[others], batch.encoder.slot[others])


@pytest.mark.parametrize(
    "length, labels, at_mask", [(3, True, 5), (3, False, -1), (0, True, 2), (0, False, -1)]
)
def test_soft_tokens_behind_a_mask_that_goes_keep_their_rows(length, labels, at_mask):
    """A word of one piece leaves the second mask, and the soft tokens of all parts move up.

    At the first mask stands the word, or the first row behind those that the template places.
    """
    prompt = compose(f"soft(length=2)+dart(length={length},fluency=1.0,labels={labels})")
    soft = list(range(2 + length))
    kinds = [Role.SPECIAL] * 3 + [Role.SOFT] * len(soft) + [Role.TEXT, Role.SPECIAL]
    columns, slot = np.arange(len(kinds), dtype=np.int32), [-1, -1, -1, *soft, -1, -1]
    ints = [np.int32([x]) for x in (columns + 10, slot, columns, 0 * columns)]
    tokens = Tokens(ints[0], np.ones((1, len(kinds)), bool), *ints[1:], np.int8([kinds]))
    batch = Batch(tokens, np.int32([[1, 2]]), np.int32([0]), np.ones(1), np.int32([0]))
    (term,) = prompt.objectives()
    view = term.view(batch, jax.random.key(0)).encoder
    assert view.mask[0].tolist() == [True] * (len(kinds) - 1) + [False]
    assert view.slot[0, :-1].tolist() == [-1, at_mask, *soft, -1, -1]


def test_each_part_starts_from_its_export_or_as_it_says():
    """A part without numbers that train is left out."""
    prompt = compose(
        "soft(length=2,init='runs/a')+prefix(length=1)+soft(length=1,start=text,text=x)"
    )
    calls = []
    inherit = lambda init, random_params: calls.append((init, random_params)) or "from an export"
    source = InitSource(*[None] * 7, inherit, None, None)
    random_parts = {"soft": "drawn 0", "prefix": "drawn 1"}
    assert prompt.begin(random_parts, source) == {"soft": "from an export", "prefix": "drawn 1"}
    assert calls == [("runs/a", "drawn 0")]
    assert prompt.inherits() == [("runs/a", prompt.components()[0].method)]
    assert prompt.starts() == ["normal", "text"]


def test_parts_add_the_rows_that_their_exports_hold():
    """An export holds no rows of words but those that it trained: the others it takes again."""
    prompt = compose("prefix(length=1)+ipt(length=2,pretrained='topics')")
    exported = make_prompt("ipt", DIMS, length=2).with_vocabulary(np.array([5, 8]))
    table = np.arange(32, dtype=np.float32).reshape(2, 16)
    calls = []
    take = lambda path: calls.append(path) or (exported, {"words": {"table": table}})
    actual = prompt.with_base({"prefix": {"table": 1}}, take)
    assert calls == ["topics"] and actual["prefix"] == {"table": 1}
    base = actual["ipt"]["words"]["base"]
    assert base.shape == (64, 16)  # 53 words, rounded up
    np.testing.assert_array_equal(base[[5, 8]], table)
    assert np.abs(np.delete(base, [5, 8], axis=0)).max() <= exported.scale


@pytest.mark.parametrize(
    "parts, message",
    [
        ("soft", "must combine at least two trainable methods; use methods"),
        ("soft+none", "must combine at least two trainable methods"),
        ("soft+soff", "prompt.parts, soff: unknown method 'soff'; nearest: soft"),
        ("soft(length=0)+prefix", "prompt.parts, soft: prompt.length=0 must be at least 1"),
        ("soft(lenght=3)+prefix", "prompt.name=soft has no field 'lenght'; nearest: length"),
        ("soft+soft(length='a')", "prompt.parts, soft-2: config field prompt.length='a' must"),
        ("dart(length=2)+dpt(length=2)", "dart and dpt train vectors for the head; use only one"),
        ("prefix+prefix(shift=False)", "has shift=False and True; combined prefixes"),
        ("prefix(layers='1-2')+prefix", "has layers='' and '1-2'; combined prefixes"),
        ("prefix(length=0,decoder=2)+prefix(length=0,decoder=1,shift=False)", "has shift=False an"),
        ("soft+compose", "contains compose itself"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts, message):
    with pytest.raises(InputError) as error:
        compose(parts, T5_DIMS)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "parts",
    [
        "prefix(length=4,layers='1-1')+prefix(length=0,cross=4)",
        "prefix(length=2,decoder=2,decoder_layers='1-2')+prefix(length=2)",
        "prefix(length=2,layers='1-4')+prefix(length=2)",
        "prefix(length=2)+prefix(length=0,decoder=2,shift=False)",
        "ipt(length=3)+prefix(length=4)+constant(length=0,cross_length=4,cross_last=3)",
    ],
)
def test_prefixes_that_do_not_meet_may_differ(parts):
    """Of other streams, or with other words for the same layers."""
    assert len(compose(parts, T5_DIMS).components()) >= 2


def test_a_method_without_the_field_agrees_with_all():
    """A new one may have a prefix that neither shifts nor is of some layers."""
    check_prefixes_agree(
        [{"length": 2}, {"length": 3, "shift": True}], DIMS, "parts", is_folded=True
    )
