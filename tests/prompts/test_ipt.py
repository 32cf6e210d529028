"""Instance-wise prompts: what they read of a text, and what is stored of a row per word."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tiny import (
    assert_close,
    assert_equal,
    draw_params,
    exact_jit,
    make_batch,
    make_params,
    make_tiny,
)

from jaxprompt.errors import InputError
from jaxprompt.heads import linear
from jaxprompt.layers.instance import (
    InstanceEncoder,
    _share_of_count,
    first_words,
    mean_prompt_vector,
)
from jaxprompt.layers.word_rows import (
    WordRows,
    full_table,
    hash_vectors,
    init_table,
    pack_ids,
    row_indices,
    unpack_ids,
)
from jaxprompt.models.model import Model
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.prompts import InitSource, make_prompt
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import count, flatten, split_trainable, trainable_mask
from jaxprompt.types import Dims, Injection, Objective, Prefix, Role, Stream

torch = pytest.importorskip("torch")

DIMS = Dims(vocab=53, width=16, embed=12, layers=2, heads=2, head_dim=8, max_len=40)
LARGE = Dims(vocab=50_265, width=1024, embed=1024, layers=24, heads=16, head_dim=64, max_len=514)
ROBERTA_LARGE = 355_359_744  # parameters of the body
KINDS = ("cnn", "lstm", "mlp")
ENCODES, LSTM, MLP = ({"encoder": kind, "fixed": True} for kind in KINDS)
# Parameters at the shape of RoBERTa-large with 100 vectors: soft tokens, keys and values.
SIZES = {
    "cnn": (854_224, 1_693_904), "lstm": (752_320, 1_346_240), "mlp": (718_336, 1_345_024)
}  # fmt: skip


def start(batch, dims=DIMS, **fields):
    prompt = make_prompt("ipt", dims, **fields)
    params = prompt.init(jax.random.key(0), batch, None, deterministic=True).get("params", {})
    return prompt, params


def inject(prompt, params, batch):
    """-> the prompt of the input, its slots or its prefix"""
    return prompt.apply({"params": params}, batch, None, deterministic=True).encoder


# -- what is read of a text ------------------------------------------------------------------------


@pytest.mark.long_cases("1.0")
@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.26, 0.1, 1e-5])
def test_a_share_of_the_words_is_counted_exactly(share):
    """Rounded up from the exact product, which 0.3 * 10 is not in floating point."""
    batch = make_batch(rows=8, length=24)
    words = first_words(batch.encoder, share)
    for row in range(8):
        text = batch.encoder.ids[row][batch.encoder.roles[row] == Role.TEXT]
        used = -(-len(text) * round(share * 100_000) // 100_000)
        assert words.mask[row].sum() == used and used >= 1
        np.testing.assert_array_equal(words.ids[row][words.mask[row]], text[:used])


@pytest.mark.long_cases("fields1", "fields2", "fields3")
@pytest.mark.parametrize(
    "fields", [{}, ENCODES, LSTM, MLP, {"on": "prefix"}, {"on": "prefix", **ENCODES}]
)
def test_only_the_words_that_are_read_feed_the_prompt(fields):
    """Special tokens, the template's own words, padding and what is behind the share do not."""
    batch = make_batch(rows=6, length=20, slots=0)
    prompt, params = start(batch, length=3, utilization=0.5, **fields)
    before = inject(prompt, params, batch)
    tokens = batch.encoder
    text = np.cumsum(tokens.roles == Role.TEXT, 1)
    read = (tokens.roles == Role.TEXT) & (text <= -(-text[:, -1:] // 2))
    if not fields.get("encoder"):
        read &= text <= 3
    spoilt = batch._replace(encoder=tokens._replace(ids=np.where(read, tokens.ids, 7)))
    assert_equal(inject(prompt, params, spoilt), before)
    for place in range(int(read[0].sum())):
        ids = tokens.ids.copy()
        at = np.flatnonzero(read[0])[place]
        ids[0, at] = ids[0, at] % 40 + 9
        moved = inject(prompt, params, batch._replace(encoder=tokens._replace(ids=ids)))
        pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(before), strict=True)
        assert any(not np.array_equal(a, b) for a, b in pairs), place


@pytest.mark.default_cases("fields0-prompt", "fields2-prefix", "fields3-prompt")
@pytest.mark.parametrize("on", ["prompt", "prefix"])
@pytest.mark.parametrize("fields", [{}, ENCODES, LSTM, MLP])
def test_a_short_text_has_a_short_prompt_and_an_empty_one_none(on, fields):
    batch = make_batch(rows=3, length=12)
    roles = np.full((3, 12), Role.SPECIAL, np.int8)
    roles[1, 4:6], roles[2, 2:11] = Role.TEXT, Role.TEXT
    batch = batch._replace(encoder=batch.encoder._replace(roles=roles, mask=roles >= 0))
    prompt, params = start(batch, length=5, on=on, added=False, **fields)
    injection = inject(prompt, params, batch)
    mask = injection.slots_mask if on == "prompt" else injection.prefix.mask[0]
    assert mask.sum(1).tolist() == ([0, 5, 5] if fields else [0, 2, 5])
    assert np.isfinite(jax.tree.leaves(injection)[0]).all()
    if on == "prefix":
        assert not np.asarray(injection.prefix.mask[1]).any()  # layer 2 has none


@pytest.mark.parametrize("on", ["prompt", "prefix"])
def test_the_control_has_the_prompt_of_the_text_before(on):
    """Its vectors and how many there are, which differs between texts."""
    batch, fields = make_batch(rows=4), {"length": 9, "on": on, "added": False, "layers": ""}
    first, others = (
        inject(*start(batch, shuffled=shuffled, **fields), batch) for shuffled in (False, True)
    )
    there = first.slots_mask if on == "prompt" else first.prefix.mask
    assert len({tuple(row) for row in np.asarray(there).reshape(-1, 9)}) > 1
    axis = 0 if on == "prompt" else 1  # of the texts
    pairs = zip(jax.tree.leaves(others), jax.tree.leaves(first), strict=True)
    for after, before in pairs:
        if np.ndim(after) > 1:  # all but the positions of a prefix
            np.testing.assert_array_equal(after, np.roll(before, 1, axis=axis))


@pytest.mark.parametrize(
    ("fields", "shift"),
    [
        ({"on": "prefix"}, 7),
        ({"on": "prefix", "shift": False}, 0),  # as in the released code
        ({"on": "prompt"}, 0),  # soft tokens stand in the input
    ],
)
def test_a_texts_positions_begin_behind_a_prefix_that_shifts_them(fields, shift):
    assert make_prompt("ipt", DIMS, length=7, **fields).position_shift() == shift


def test_the_keys_and_values_of_the_task_start_with_a_deviation_of_0_02():
    wide = DIMS._replace(layers=8, heads=8, head_dim=32)
    _, params = start(make_batch(rows=1), wide, on="prefix", length=20, layers="1", scale=0.5)
    task = np.asarray(params["task"])  # [L, 2, P, N, D]
    assert task.shape == (8, 2, 20, 8, 32)
    assert task.std() == pytest.approx(0.02, rel=0.02) and abs(task.mean()) < 5e-4


def test_rows_are_added_to_the_first_layer_of_a_task_prefix():
    """As in the released code: 0.05 times the row, in the keys and values of layer 1 alone."""
    batch = make_batch(rows=4)
    prompt, params = start(batch, on="prefix", length=3)
    injection = inject(prompt, params, batch).prefix
    task = np.asarray(params["task"])  # [L, 2, P, N, D]
    words = first_words(batch.encoder, 1.0, 3)
    rows = np.asarray(params["words"]["table"])[words.ids] * np.asarray(words.mask)[..., None]
    pairs = 0.05 * rows.reshape(4, 3, 2, 2, 8)
    for i, keys in enumerate((injection.k, injection.v)):
        np.testing.assert_allclose(keys[0], task[0, i] + pairs[:, :, i], atol=1e-7)
        np.testing.assert_array_equal(keys[1], np.broadcast_to(task[1, i], (4, 3, 2, 8)))
    assert injection.mask.all()


# -- encoders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["prompt", "prefix"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_is_below_half_a_percent_of_roberta_large(kind, on):
    batch = make_batch(rows=1)
    fields = {"length": 100, "on": on, "encoder": kind, "fixed": True, "added": False}
    shapes = jax.eval_shape(lambda: start(batch, LARGE, **fields)[1])
    assert count(shapes) == SIZES[kind][on == "prefix"] <= 0.005 * ROBERTA_LARGE


def test_the_convolutions_are_torchs():
    """A convolution, ReLU and the maximum over the windows that begin at a word, with words of 0
    behind them."""
    torch.manual_seed(0)
    x, lengths = torch.randn(3, 9, 6), np.array([9, 4, 1])
    mask = np.arange(9) < lengths[:, None]
    ours = InstanceEncoder("cnn", 4, 5, 7, 0.3)
    params = ours.init(jax.random.key(1), jnp.asarray(x), jnp.asarray(mask))["params"]
    features = []
    for size in (3, 4, 5):
        conv = torch.nn.Conv1d(6, 4, size)
        kernel = np.array(params[f"conv{size}"]["kernel"])  # [size, E, X]
        conv.weight.data = torch.tensor(kernel.transpose(2, 1, 0).copy())
        conv.bias.data.uniform_(-1, 1)
        params[f"conv{size}"]["bias"] = jnp.asarray(conv.bias.detach().numpy())
        best = []
        for row, length in zip(x, lengths, strict=True):
            padded = torch.cat([row[:length], torch.zeros(size - 1, 6)]).T[None]
            best.append(torch.relu(conv(padded)).amax(-1)[0])
        features.append(torch.stack(best))
    pooled = torch.cat(features, -1).detach().numpy()  # [B, X]
    places, basis, shared = (np.array(params[name]) for name in ("places", "basis", "shared"))
    expected = shared + np.einsum("bx,px,xw->bpw", pooled, places, basis)
    actual = ours.apply({"params": params}, jnp.asarray(x), jnp.asarray(mask))
    assert_close(actual, expected)


def test_the_lstm_is_torchs_averaged_over_the_words_that_are_there():
    """Three bidirectional layers, their mean, and two linear layers (appendix A.3)."""
    torch.manual_seed(0)
    x, lengths = torch.randn(3, 9, 6), np.array([9, 4, 1])
    mask = np.arange(9) < lengths[:, None]
    ours = InstanceEncoder("lstm", 4, 5, 7, 0.3)
    words, there = jnp.asarray(x), jnp.asarray(mask)
    params = draw_params(ours, words, there)
    lstm = torch.nn.LSTM(6, 4, 3, bidirectional=True, batch_first=True)
    linear = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    with torch.no_grad():
        for layer in range(3):
            for way, end in enumerate(("", "_reverse")):
                weights = [
                    np.array(params["lstm"][f"{n}{layer}"][way]) for n in ("input", "recurrent")
                ]
                getattr(lstm, f"weight_ih_l{layer}{end}").copy_(torch.tensor(weights[0].T))
                getattr(lstm, f"weight_hh_l{layer}{end}").copy_(torch.tensor(weights[1].T))
                bias = np.array(params["lstm"][f"bias{layer}"][way])
                getattr(lstm, f"bias_ih_l{layer}{end}").copy_(torch.tensor(bias))
                getattr(lstm, f"bias_hh_l{layer}{end}").zero_()
        for number, layer in enumerate(linear):
            weights = params["linear"][f"linear{number}"]
            layer.weight.copy_(torch.tensor(np.array(weights["kernel"]).T))
            layer.bias.copy_(torch.tensor(np.array(weights["bias"])))
        means = [
            lstm(row[None, :length])[0][0].mean(0) for row, length in zip(x, lengths, strict=True)
        ]
        features = linear[1](torch.relu(linear[0](torch.stack(means)))).relu().numpy()
    places, basis, shared = (np.array(params[name]) for name in ("places", "basis", "shared"))
    expected = shared + np.einsum("bx,px,xw->bpw", features, places, basis)
    assert_close(jax.jit(ours.apply)({"params": params}, words, there), expected)


# -- the mean of a prompt, which pictures and topic classifiers read ------------------------------


def test_soft_tokens_that_are_there_are_averaged():
    slots = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    there = np.array([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
    mean = mean_prompt_vector(Injection(Stream(slots=slots, slots_mask=there)))
    expected = np.stack([slots[0, [0, 1, 3]].mean(0), slots[1, 1], np.zeros(5)])
    assert_close(mean, expected)
    assert_close(mean_prompt_vector(Injection(Stream(slots=slots))), slots.mean(1))


def test_keys_and_values_of_all_layers_that_have_some_are_averaged_side_by_side():
    """A head's key and its value follow one another."""
    k, v = np.random.default_rng(0).normal(size=(2, 3, 2, 4, 2, 5)).astype(np.float32)
    there = np.zeros((3, 2, 4), bool)  # [L, B, P]: of the layers the first has none
    there[1, :, :3], there[2, 0, 1:] = True, True
    mean = mean_prompt_vector(Injection(Stream(prefix=Prefix(k, v, there))))
    for text in range(2):
        rows = [
            np.concatenate([part[layer, text, place, head] for head in (0, 1) for part in (k, v)])
            for layer, place in zip(*np.nonzero(there[:, text]), strict=True)
        ]
        assert len(rows) == (6, 3)[text]
        assert_close(mean[text], np.mean(rows, axis=0))


# -- rows of words -------------------------------------------------------------------------------


def mixed(x):
    """MurmurHash3's finaliser in whole numbers of Python."""
    x &= 2**32 - 1
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor & (2**32 - 1)
    return x ^ (x >> 16)


def test_the_row_of_a_word_that_never_trained_is_a_rule():
    """Exports rely on it. The host and the device agree to the last bit."""
    ids = np.array([[0, 1], [29_000, 2**18]])
    actual = hash_vectors(ids, 5, 0.5)
    np.testing.assert_array_equal(actual, hash_vectors(ids, 5, 0.5, np))
    for word, row in ((0, actual[0, 0]), (29_000, actual[1, 0])):
        stated = [(mixed(word * 5 + at + 0x9E3779B9) >> 8) / 2**24 - 0.5 for at in range(5)]
        np.testing.assert_allclose(row, stated, atol=1e-7)
    assert stated[0] == pytest.approx(-0.31272322)
    many = hash_vectors(np.arange(4000), 32, 0.5, np)
    assert many.min() >= -0.5 and many.max() < 0.5 and abs(many.mean()) < 2e-3
    assert abs(many.std() - 12**-0.5) < 2e-3
    near = np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]
    assert abs(near) < 0.01 and len(np.unique(many[:, 0])) > 3990


def test_ids_are_packed():
    ids = np.unique(np.random.default_rng(0).integers(0, 30_522, 800))
    assert unpack_ids(pack_ids(ids)).tolist() == ids.tolist() and len(pack_ids(ids)) < 3000
    assert unpack_ids(pack_ids(np.zeros(0, int))).tolist() == []
    for broken in ("???", "abcd", pack_ids(ids)[:-9]):
        with pytest.raises(InputError, match="cannot be read"):
            unpack_ids(broken)
    with pytest.raises(InputError, match="beyond the 53 of this backbone"):
        row_indices(pack_ids(np.array([53])), 53)


def trainer(tx, rows, seen_words=""):
    """Makes a model with a row per word. -> params, (state, batch) -> state"""
    backbone, weights = make_tiny()
    prompt = make_prompt("ipt", backbone.dims, length=3, rows=rows, seen=seen_words)
    model = Model(backbone, prompt, {"main": linear.Classifier(3, dropout=0.0)})
    params = make_params(model, weights)
    step = exact_jit(make_train_step(model, tx, [Objective("main", cross_entropy)]))
    return prompt, params, step


@pytest.mark.long_cases("sgd")
@pytest.mark.parametrize(
    "tx", [optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)], ids=["sgd", "adam"]
)
def test_rows_of_the_words_seen_train_as_those_of_a_whole_table(tx):
    """Momentum included: a word of one batch goes on moving in the next, which has it not."""
    batches = [make_batch(seed, slots=3) for seed in range(4)]
    ids = np.unique(np.concatenate([first_words(b.encoder, 1.0, 3).ids.ravel() for b in batches]))
    ends = {}
    for rows, seen_words in (("all", ""), ("seen", pack_ids(ids))):
        prompt, params, step = trainer(tx, rows, seen_words)
        ipt_params = split_trainable(params, trainable_mask(params, prompt.TRAINABLE))
        trainable, frozen = ipt_params
        whole = np.random.default_rng(1).normal(0, 0.3, (53, 16)).astype(np.float32)
        stored, table = whole if rows == "all" else whole[ids], np.zeros((64, 16), np.float32)
        table[: len(stored)] = stored
        trainable["prompt/words/table"] = jnp.asarray(table)
        state = make_state(trainable, tx, jax.random.key(0))
        for batch in batches:
            state, _ = step(state, frozen, batch)
        ends[rows] = np.asarray(state.trainable["prompt/words/table"])
    np.testing.assert_array_equal(ends["seen"][: len(ids)], ends["all"][ids])
    others = np.setdiff1d(np.arange(53), ids)
    assert len(others) > 5
    np.testing.assert_array_equal(ends["all"][others], whole[others])


def test_words_that_were_not_seen_have_the_rows_of_the_export():
    rows = WordRows(53, 6, 0.5, pack_ids(np.array([4, 9])), has_base=True)
    table, base = np.random.default_rng(0).normal(size=(2, 64, 6)).astype(np.float32)
    actual = rows.apply({"params": {"table": table, "base": base}}, jnp.array([9, 5]))
    np.testing.assert_array_equal(actual, np.stack([table[1], base[5]]))


def test_the_rows_are_sharded_over_the_vocabulary():
    """All of them too, of 53 words, which do not divide by 4."""
    place, parts = make_placement(2, 4), "ipt(length=2,rows='all')+soft(length=2)"
    shardings = [
        ("ipt", dict(rows="all")),
        ("ipt", dict(pretrained="x")),
        ("compose", dict(parts=parts)),
    ]
    for name, fields in shardings:
        prompt = make_prompt(name, DIMS, **fields).with_vocabulary(np.arange(9))
        shapes = jax.eval_shape(
            lambda prompt=prompt: prompt.init(
                jax.random.key(0), make_batch(), None, deterministic=True
            )
        )
        actual = place.param_shardings(flatten({"prompt": shapes["params"]}))
        rows = {n: x.spec for n, x in actual.items() if "/words/" in n}
        assert rows and set(rows.values()) == {PartitionSpec("model", None)}
        others = {x.spec for n, x in actual.items() if n not in rows}
        assert others == ({PartitionSpec()} if name == "compose" else set())


@pytest.mark.parametrize("fields", [{}, {"rows": "all"}, {"rows": "all", "on": "prefix"}])
def test_an_export_holds_the_rows_of_words_alone(fields):
    """What rounds their number up is made again, and a table of another size is left to a check."""
    for name in ("ipt", "compose"):
        words = ",".join(f"{field}={value!r}" for field, value in ({"length": 2} | fields).items())
        overrides = dict(parts=f"ipt({words})+prefix(length=1)") if name == "compose" else fields
        prompt = make_prompt(name, DIMS, **overrides).with_vocabulary(np.array([5, 9, 20]))
        params = prompt.init(jax.random.key(0), make_batch(), None, deterministic=True)["params"]
        inner = lambda tree, name=name: tree["ipt"] if name == "compose" else tree
        stored = 53 if fields else 3
        exported = prompt.exported(params)
        assert len(inner(exported)["words"]["table"]) == stored
        whole = prompt.with_base(exported, None)
        assert jax.tree.map(np.shape, whole) == jax.tree.map(np.shape, params)
        actual, expected = (inner(x)["words"]["table"][:stored] for x in (whole, params))
        np.testing.assert_array_equal(actual, expected)
        assert not np.asarray(inner(whole)["words"]["table"][stored:]).any()
        inner(exported)["words"]["table"] = np.zeros((2, 12))
        assert inner(prompt.with_base(exported, None))["words"]["table"].shape == (2, 12)


def test_a_part_that_stores_all_rows_does_so_beside_one_that_stores_those_seen():
    prompt = make_prompt("compose", DIMS, parts="ipt(length=2,rows=all)+ipt(length=2)")
    prompt = prompt.with_vocabulary(np.array([5, 9]))
    shapes = jax.eval_shape(
        lambda: prompt.init(jax.random.key(0), make_batch(), None, deterministic=True)["params"]
    )
    rows = {name: part["words"]["table"].shape for name, part in shapes.items()}
    assert rows == {"ipt": (64, 12), "ipt-2": (64, 12)}
    prompt = make_prompt("compose", LARGE, parts="ipt(length=2,rows='all')+ipt(length=2)")
    prompt = prompt.with_vocabulary(np.array([5, 9]))
    rows = {part.name: part.method.table().stored() for part in prompt.components()}
    assert rows == {"ipt": 50_265, "ipt-2": 2}


def test_long_texts_are_counted_without_overflow():
    count = jnp.array([21_475, 400_000])
    assert _share_of_count(count, 1.0).tolist() == [21_475, 400_000]
    assert _share_of_count(count, 0.3).tolist() == [6_443, 120_000]


@pytest.mark.parametrize("change", [{"vocab": 54}, {"embed": 14}])
def test_rows_of_another_vocabulary_or_width_are_refused(change):
    prompt, _ = start(make_batch(rows=2), length=2, pretrained="topics")
    other = make_prompt("ipt", DIMS._replace(**change), length=2)
    message = (
        f"topics has vectors of size {other.dims.embed} for {other.dims.vocab} words, but this"
    )
    with pytest.raises(InputError, match=message):
        full_table(prompt.table(), "topics", other, {})


def test_rows_start_from_those_of_an_export_where_it_has_them_and_from_its_rule_elsewhere():
    prompt = make_prompt("ipt", DIMS, length=2, pretrained="topics")
    prompt = prompt.with_vocabulary(np.array([3, 5, 9]))
    other = make_prompt("ipt", DIMS, length=2).with_vocabulary(np.array([5, 8]))
    table = np.arange(24, dtype=np.float32).reshape(2, 12)
    actual = init_table(
        prompt.table(), "topics", {"table": np.zeros((3, 12))}, other, {"words": {"table": table}}
    )["table"]
    rule = hash_vectors(np.arange(DIMS.vocab), 12, other.scale, np)
    np.testing.assert_array_equal(actual, [rule[3], table[0], rule[9]])


def test_an_encoder_starts_from_that_of_the_export():
    """What this prompt has beyond, as keys and values of its task, stays as it was drawn."""
    fields = dict(length=2, encoder="mlp", on="prefix")
    prompt = make_prompt("ipt", DIMS, **fields, pretrained="topics").with_vocabulary(np.arange(3))
    exported = make_prompt("ipt", DIMS, **fields).with_vocabulary(np.array([1]))
    table = np.full((1, 32), 7, np.float32)
    export = exported, {"encoder": "of the export", "words": {"table": table}}
    source = InitSource(*[None] * 8, {"topics": export}.get, None)
    random_params = {"encoder": "drawn", "task": "drawn", "words": {"table": np.zeros((3, 32))}}
    params = prompt.begin(random_params, source)
    assert params["encoder"] == "of the export" and params["task"] == "drawn"
    np.testing.assert_array_equal(params["words"]["table"][1], table[0])
    plain = make_prompt("ipt", DIMS, **fields)
    assert plain.begin(random_params, source) is random_params
