"""States that are kept: what is read is what was written, and a model goes on from it."""

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIGS, assert_close, jit, make_batch, make_params, make_tiny

from jaxprompt.backbones import families
from jaxprompt.errors import InputError
from jaxprompt.heads import linear
from jaxprompt.models.model import Model
from jaxprompt.parallel.hlo import count_work
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.training.features import store as feature_store
from jaxprompt.training.features.choice import choose_features
from jaxprompt.tree import merge, split_trainable, trainable_mask

SIZES = np.array([3, 0, 5, 1, 4])
FACTS = {"the data": "5 rows", "cache.dtype": "float32"}
FLOAT = np.dtype(np.float32)


def lay(rows, length, side):
    """Lays rows into a mask, one by one. -> bool [B, T]"""
    mask = np.zeros((len(rows), length), bool)
    for mask_row, row in zip(mask, rows, strict=True):
        size = SIZES[row] if row >= 0 else 0
        mask_row[length - size :] = side == "left"
        mask_row[:size] |= side == "right"
    return mask


def fill(store, width=2):
    """Writes row r as r + 0, 0.1, ... in two batches of differing lengths and sides."""
    for rows, length, side in (([2, 4, 0], 6, "right"), ([3, 1, -1], 2, "left")):
        mask = lay(rows, length, side)
        values = np.full((*mask.shape, width), np.nan, np.float32)
        for b, row in enumerate(rows):
            size = mask[b].sum()
            values[b, mask[b]] = row + 0.1 * np.arange(size)[:, None] + 100 * np.arange(width)
        store.write(np.array(rows), mask, values.astype(store.states.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_any_batch_reads_what_was_written(dtype, side):
    store = feature_store.memory_store(SIZES, 2, jnp.dtype(dtype))
    fill(store)
    rows = [0, -1, 4, 2, 1]
    mask = lay(rows, 7, side)
    actual = store.read(np.array(rows), mask)
    assert actual.shape == (5, 7, 2) and actual.dtype == jnp.dtype(dtype)
    for b, row in enumerate(rows):
        expected = np.zeros((7, 2), np.float32)
        if row >= 0:
            row_states = row + 0.1 * np.arange(SIZES[row])[:, None] + np.array([0, 100])
            expected[mask[b]] = row_states
        rounded = expected.astype(actual.dtype)
        np.testing.assert_array_equal(actual[b].astype(np.float32), rounded.astype(np.float32))


def test_a_row_of_another_length_is_an_error():
    store = feature_store.memory_store(SIZES, 2, FLOAT)
    with pytest.raises(ValueError, match=r"rows of \[4\] tokens, of which \[3\] states"):
        store.read(np.array([0]), np.ones((1, 4), bool))


# -- disk -----------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path):
    """A filled store on disk. -> its path"""
    store = feature_store.DiskStore(tmp_path / "kept" / "train", SIZES, 2, FLOAT)
    fill(store)
    store.seal(FACTS)
    return tmp_path / "kept" / "train"


def reopen(path, facts=FACTS, sizes=SIZES, width=2):
    return feature_store.open_states(path, facts, sizes, width, FLOAT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sealed_store_is_read_again(tmp_path, dtype):
    path, form = tmp_path / "train", (SIZES, 2, jnp.dtype(dtype))
    assert feature_store.open_states(path, FACTS, *form) is None
    store = feature_store.DiskStore(path, *form)
    fill(store)
    assert feature_store.open_states(path, FACTS, *form) is None, "not whole yet"
    reopened = store.seal(FACTS)
    rows = np.array([4, 2])
    mask = lay(rows, 5, "right")
    again = feature_store.open_states(path, FACTS, *form)
    np.testing.assert_array_equal(again.read(rows, mask), reopened.read(rows, mask))
    assert not again.states.flags.writeable
    actual = sorted(p.name for p in tmp_path.iterdir())
    assert actual == ["train.json", "train.states"]
    assert (tmp_path / "train.states").stat().st_size == 13 * 2 * jnp.dtype(dtype).itemsize


def test_other_facts_are_refused_by_name(sealed):
    with pytest.raises(InputError) as caught:
        reopen(sealed, {"the data": "6 rows", "backbone.dtype": "bfloat16", **FACTS} | {"x": "1"})
    assert "backbone.dtype (saved None, now 'bfloat16'), x (saved None, now '1')" in str(
        caught.value
    )
    with pytest.raises(InputError, match=r"the data \(saved '5 rows', now '6 rows'\); use another"):
        reopen(sealed, FACTS | {"the data": "6 rows"})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)


SPOIL = {
    "flipped": ("states", flip),
    "absent": ("states", Path.unlink),
    "no_json": ("json", lambda p: p.write_text("{")),
    "no_facts": ("json", lambda p: p.write_text("{}")),
}


@pytest.mark.parametrize("case", SPOIL)
def test_damage_is_found(sealed, case):
    part, spoil = SPOIL[case]
    spoil(sealed.with_name(f"train.{part}"))
    with pytest.raises(InputError, match="train.states is damaged; delete"):
        reopen(sealed)


def test_what_a_killed_run_left_is_written_over(tmp_path):
    store = feature_store.DiskStore(tmp_path / "train", SIZES, 2, FLOAT)
    store.states[:] = 7
    store._file.close()  # as the end of a process does
    store = feature_store.DiskStore(tmp_path / "train", SIZES, 2, FLOAT)
    fill(store)
    store.seal(FACTS)
    assert reopen(tmp_path / "train").states.max() < 105


def test_each_process_has_files_of_its_own(tmp_path):
    paths = [
        feature_store.states_path(tmp_path, "train", i, n) for n in (1, 2, 12) for i in range(n)
    ]
    assert [path.name for path in paths[:3]] == ["train", "train-0-of-2", "train-1-of-2"]
    assert len(set(paths)) == 15


def test_what_is_written_anew_is_never_whole_with_what_was_there(sealed, monkeypatch):
    """Cut between the states and the file that calls them whole, there is nothing."""
    again = feature_store.DiskStore(sealed, SIZES, 2, FLOAT)
    again.states[:] = 7

    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(feature_store, "write_atomic", cut)
    with pytest.raises(KeyboardInterrupt):
        again.seal(FACTS)
    again._file.close()  # as the end of a process does
    assert reopen(sealed) is None


def test_two_runs_do_not_fill_one_folder(tmp_path):
    first = feature_store.DiskStore(tmp_path / "train", SIZES, 2, FLOAT)
    with pytest.raises(InputError, match="another run is filling .*; wait for it"):
        feature_store.DiskStore(tmp_path / "train", SIZES, 2, FLOAT)
    first._file.close()


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match="cannot write .*: No space left on device"):
        feature_store.DiskStore(tmp_path / "train", SIZES, 2, FLOAT)
    assert not list(tmp_path.iterdir())


# -- models that go on from what is kept ----------------------------------------------------------

LAYERS = 4
DEEP = {
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "encoder_layers": LAYERS,
}
PARTS = {  # prompt fields, how many layers are spared
    "upper": (dict(length=3, layers="4-4", dropout=0.2), 3),
    "middle": (dict(length=3, layers="2-3", dropout=0.2), 1),
    "decoder": (dict(length=0, decoder=2, cross=2, dropout=0.2), LAYERS),
}
OLDER = ("bert", "electra", "gpt2", "roberta", "t5")
CASES = [(family, "upper") for family in OLDER]
CASES += [("bert", "middle"), ("gpt2", "middle"), ("t5", "middle"), ("t5", "decoder")]
# What a GLM writes reads every layer of its input: none is kept.
NEWER = ("eurobert", "mpnet", "t5gemma", "xlm_roberta_xl")  # last: what each case is stays the same
LISTED = (*OLDER, *NEWER, "bart", "glm")
CASES += [(family, "upper") for family in families() if family not in LISTED]
CASES += [("bart", "upper"), ("bart", "decoder"), *((family, "upper") for family in NEWER)]


def prepare(family, part, stack="scan", rows=8, **fields):
    """Makes a model, the one that goes on from what is kept, and their batches."""
    overrides, low = PARTS.get(part, ({}, 0))
    config_fields = CONFIGS.get(family, CONFIGS["bert"])
    deep = {name: value for name, value in DEEP.items() if name in config_fields}
    if "encoder" in config_fields:  # a T5Gemma's
        deep["encoder"] = config_fields["encoder"] | {"num_hidden_layers": LAYERS}
    backbone, weights = make_tiny(family, stack=stack, **deep)
    prompt = make_prompt("prefix", backbone.dims, **overrides | fields)
    model = Model(backbone, prompt, {"main": linear.Classifier(3, "cls", 0.2)})
    params = make_params(model, weights)
    shift = {"shift": prompt.position_shift(), "decoder_shift": prompt.decoder_shift()}
    batch = make_batch(rows=rows, family=family, **shift)
    enter = lambda p, b: backbone.apply({"params": p["backbone"]}, b, low, method="enter")
    cached_batch = batch._replace(cached=np.asarray(jit(enter)(params, batch))) if low else batch
    cfg = dataclasses.replace(backbone.cfg, skip=low)
    rest = dataclasses.replace(model, backbone=backbone.clone(cfg=cfg))
    return model, rest, params, batch, cached_batch, enter


def make_grad(model, params):
    trainable, frozen = split_trainable(params, trainable_mask(params, model.prompt.TRAINABLE))

    def loss(trainable, frozen, batch):
        scores = model.forward(
            merge(trainable, frozen), batch, deterministic=False, key=jax.random.key(7)
        )
        total, n = cross_entropy(scores, batch.labels, batch.weights)
        return total / n

    return jit(jax.value_and_grad(loss)), (trainable, frozen)


@pytest.mark.default_cases("modernbert-upper-*")
@pytest.mark.parametrize(
    "family, part, stack", [(*c, ("unroll", "scan")[(i + i // 2) % 2]) for i, c in enumerate(CASES)]
)
def test_the_rest_of_a_model_gives_the_same(family, part, stack):
    """Loss and gradients, with dropout of the prefix and before the head."""
    model, rest, params, batch, cached_batch, enter = prepare(family, part, stack)
    results = []
    for part_model, part_batch in ((model, batch), (rest, cached_batch)):
        grad, args = make_grad(part_model, params)
        program = grad.lower(*args, part_batch).compile()
        results.append((program(*args, part_batch), program))
    assert_close(results[1][0], results[0][0], rtol=1e-5)
    assert np.abs(results[0][0][1]["prompt/" + next(iter(params["prompt"]))]).max() > 0
    # What is spared are the products of the layers below, exactly.
    whole, left = (count_work(program.as_text()).flops for _, program in results)
    below = count_work(jit(enter).lower(params, batch).compile().as_text()).flops
    assert below > 0 and whole - left == below


def test_padding_with_other_lengths_is_no_part_of_what_is_kept():
    model, rest, params, batch, cached_batch, _ = prepare("bert", "upper")
    empty = cached_batch._replace(
        cached=np.where(batch.encoder.mask[..., None], cached_batch.cached, 0.0)
    )
    score = lambda model: jit(lambda b: model.forward(params, b))
    assert_close(score(rest)(empty), score(model)(batch), rtol=1e-5)


@pytest.mark.long
def test_keys_of_a_prefix_are_projected_once_a_step():
    """Of a step's products with the MLP's weights none grows with the batch."""
    work = {}
    for rows in (4, 8):
        model, _, params, batch, _, _ = prepare("bert", "", rows=rows, length=3, hidden=5)
        grad, args = make_grad(model, params)
        work[rows] = count_work(grad.lower(*args, batch).compile().as_text()).flops
    d = model.backbone.dims
    forward = 2 * 3 * 5 * (d.width + LAYERS * 2 * d.heads * d.head_dim)
    assert 2 * work[4] - work[8] == 3 * forward  # and two products as large in the backward pass


def test_states_that_a_dropout_of_activations_changes_are_not_kept():
    """As of a BART, in which it has a rate of its own."""
    backbone = SimpleNamespace(cfg=SimpleNamespace(dropout=0.0, activation_dropout=0.1))
    scorer = SimpleNamespace(model=SimpleNamespace(backbone=backbone))
    config = SimpleNamespace(cache=SimpleNamespace(location="host"))
    with pytest.raises(InputError, match="activation_dropout 0.1"):
        choose_features(config, scorer, None, None)
