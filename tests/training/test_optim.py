"""Optimizers against optax and torch, schedules against values worked out by hand."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import make_tiny

from configs.base import get_config
from jaxprompt.config.open_blocks import CHOICES
from jaxprompt.config.run import Cosine, Schedule, WarmupLinear
from jaxprompt.errors import InputError
from jaxprompt.training.optim import (
    check_no_decay,
    decay_mask,
    learning_rates,
    lr_by_part,
    make_optimizer,
    make_schedule,
    shown_lr,
)
from jaxprompt.tree import flatten

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
RNG = np.random.default_rng(0)
NAMES = {"prompt/table": (3, 4), "head/main/out/kernel": (4, 2), "backbone/norm/bias": (4,)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in NAMES.items()}
GRADS = [
    {name: RNG.normal(size=shape).astype(np.float32) for name, shape in NAMES.items()}
    for _ in range(3)
]
EQUAL = dict(prompt=0.1, head=0.1, backbone=0.1)
SCHEDULES = CHOICES["optim.schedule"].options
constant = make_schedule(Schedule(), total=9, epoch=1)


def run(tx, grads=GRADS, **constants):
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params, **constants)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(leaf) for name, leaf in params.items()}


def close(actual, expected, rtol=1e-6):
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_optaxs_and_torchs(decay):
    tx = make_optimizer("adamw", constant, EQUAL, weight_decay=decay, b1=0.8, b2=0.99, eps=1e-6)
    actual = run(tx)
    close(actual, run(optax.adamw(0.1, b1=0.8, b2=0.99, eps=1e-6, weight_decay=decay)))
    tensors = {name: torch.tensor(leaf, requires_grad=True) for name, leaf in PARAMS.items()}
    adam = torch.optim.AdamW(
        tensors.values(), lr=0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=decay
    )
    for grad in GRADS:
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(grad[name])
        adam.step()
    close(actual, {name: tensor.detach().numpy() for name, tensor in tensors.items()}, rtol=1e-5)


def test_adafactor_is_the_recipe_of_prompt_tuning():
    """beta2 = 1 - t^-0.8, no factors, RMS of the update clipped at 1, decay not times the rate."""
    tx = make_optimizer("adafactor", constant, EQUAL, weight_decay=1e-2)
    params = {name: leaf.astype(np.float64) for name, leaf in PARAMS.items()}
    second = {name: np.zeros(shape) for name, shape in NAMES.items()}
    for t, grad in enumerate(GRADS, start=1):
        beta = 1 - t**-0.8
        for name, p in params.items():
            second[name] = beta * second[name] + (1 - beta) * (grad[name] ** 2.0 + 1e-30)
            update = grad[name] / np.sqrt(second[name])
            update /= max(1.0, np.sqrt((update**2).mean()))
            params[name] = p - 0.1 * update - 1e-2 * p
    close(run(tx), params, rtol=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_adafactor_is_optaxs_on_each_matrix_by_itself(scaled):
    """Layers of unlike sizes: a root mean square over both would be wrong for either."""
    rng, sizes = np.random.default_rng(1), np.array([0.01, 10.0])
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    stack = lambda *shape: np.stack([np.float32(size) * draw(*shape) for size in sizes])
    make = lambda: {
        "backbone/layers/mlp/up/kernel": stack(130, 140),  # large enough for factors
        "backbone/layers/norm/scale": stack(140),
        "backbone/embed/project/kernel": 1e-5 * draw(140, 20),  # below the least scale
        "prompt/table": draw(5, 6),
    }
    params, grads = make(), [make() for _ in range(3)]

    def apart(flat):
        """Takes the layers out of their stacks."""
        layers = {n: leaf for n, leaf in flat.items() if "/layers/" in n}
        rest = {n: leaf for n, leaf in flat.items() if n not in layers}
        return rest | {f"{n}/{i}": leaf[i] for n, leaf in layers.items() for i in range(2)}

    def train(tx, params, grads):
        state = tx.init(params)
        for grad in grads:
            updates, state = jax.jit(tx.update)(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    rates = dict(backbone=0.01, prompt=0.01)
    tx = make_optimizer("adafactor", constant, rates, weight_decay=1e-3, scaled=scaled)
    actual, state = train(tx, params, grads)
    published = optax.adafactor(
        0.01, weight_decay_rate=1e-3, factored=scaled, multiply_by_parameter_scale=scaled
    )
    expected, _ = train(published, apart(params), [apart(grad) for grad in grads])
    close(apart(actual), expected, rtol=1e-5)
    numbers = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    if scaled:
        assert numbers(state) < 0.15 * numbers(params)
    for platform in ("tpu", "cuda"):
        jax.export.export(jax.jit(tx.update), platforms=[platform])(params, state, params)


@pytest.mark.parametrize("family", ["bert", "electra", "gpt2", "t5"])
def test_the_patterns_of_the_config_spare_biases_and_norms(family):
    """By their shapes: of one layer, norms and biases are vectors, and an attention's [N, D]."""
    module, weights = make_tiny(family)
    flat = flatten({"backbone": weights})
    decayed = decay_mask(get_config().optim.no_decay)(flat)
    for name, leaf in flat.items():
        stacked = "layers/" in name
        is_matrix = leaf.ndim - stacked - (name.endswith("/bias") and "attention" in name) > 1
        assert decayed[name] == is_matrix, name
    assert len(set(decayed.values())) == 2


def test_a_pattern_that_spares_nothing_is_refused():
    """But one of those that every config has: a prompt has no bias."""
    usual, trained = get_config().optim.no_decay, ["prompt/k", "prompt/v"]
    check_no_decay((*usual, r"prompt/k"), usual, trained)
    with pytest.raises(InputError, match=r"'prompt/q' matches no trainable parameter; near"):
        check_no_decay((*usual, r"prompt/k", r"prompt/q"), usual, trained)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_schedule_scales_the_rate(name):
    """Adafactor's decay is absolute: a halved rate leaves it whole, as a halved schedule does."""
    halved = make_optimizer(name, lambda step: 0.5, EQUAL, weight_decay=0.1)
    close(
        run(halved),
        run(make_optimizer(name, constant, dict.fromkeys(EQUAL, 0.05), weight_decay=0.1)),
    )


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_parts_have_rates_of_their_own(name):
    rates = dict(prompt=0.1, head=0.01, backbone=0.0)
    actual = run(make_optimizer(name, constant, rates))
    for part, rate in rates.items():
        alone = run(make_optimizer(name, constant, dict.fromkeys(EQUAL, rate)))
        for leaf in (leaf for leaf in NAMES if leaf.startswith(part)):
            np.testing.assert_array_equal(actual[leaf], alone[leaf])
    np.testing.assert_array_equal(actual["backbone/norm/bias"], PARAMS["backbone/norm/bias"])
    assert np.abs(actual["prompt/table"] - PARAMS["prompt/table"]).max() > 0.1


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weight_decay_spares_the_masked(name):
    patterns = [r".*/bias", r"prompt/.*"]
    assert decay_mask(patterns)(PARAMS) == {
        "prompt/table": False,
        "head/main/out/kernel": True,
        "backbone/norm/bias": False,
    }
    actual = run(make_optimizer(name, constant, EQUAL, weight_decay=0.1, no_decay=patterns))
    without, decayed = (
        run(make_optimizer(name, constant, EQUAL, weight_decay=w)) for w in (0, 0.1)
    )
    for leaf in NAMES:
        expected = decayed if leaf.startswith("head") else without
        np.testing.assert_array_equal(actual[leaf], expected[leaf])
        assert np.abs(without[leaf] - decayed[leaf]).max() > 1e-3


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clip_is_by_the_norm_of_all_parts(limit):
    clipped = []
    for grad in GRADS:
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grad.values()))
        clipped.append(
            {n: (g * min(1.0, limit / norm)).astype(np.float32) for n, g in grad.items()}
        )
    actual = run(make_optimizer("adamw", constant, EQUAL, clip=limit, eps=0.1))
    close(actual, run(make_optimizer("adamw", constant, EQUAL, eps=0.1), clipped), rtol=1e-5)


@pytest.mark.long_cases("0.0-adamw")
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_state_tells_the_learning_rate_of_each_part(name, clip):
    schedule = make_schedule(Cosine(warmup_steps=2), total=6, epoch=1)
    tx = make_optimizer(name, schedule, {"prompt": 0.2, "head": 0.1}, clip=clip)
    flat = {"prompt/table": jnp.ones(3), "head/main/out/kernel": jnp.ones((2, 2))}
    state = tx.init(flat)
    for step in range(5):
        _, state = tx.update(flat, state, flat)
        rates = learning_rates(state)
        assert rates.keys() == {"prompt", "head"}
        assert float(rates["prompt"]) == pytest.approx(0.2 * float(schedule(step)))
        assert float(rates["head"]) == pytest.approx(0.1 * float(schedule(step)))
    assert learning_rates(optax.adam(0.1).init(flat)) == {}


def test_parts_of_one_learning_rate_show_it_once():
    assert shown_lr({"head": np.float32(0.5), "prompt": np.float32(0.5)}) == 0.5
    assert shown_lr({"head": np.float32(0.5), "prompt": 0.25}) == {"head": 0.5, "prompt": 0.25}


def test_rates_and_decay_are_leaves_of_the_state():
    state = make_optimizer("adamw", constant, dict(prompt=0.5, head=0.25)).init(
        {name: PARAMS[name] for name in ("prompt/table", "head/main/out/kernel")}
    )
    named = jax.tree_util.tree_leaves_with_path(state)
    rates = {
        jax.tree_util.keystr(path): float(leaf) for path, leaf in named if "'lr'" in str(path[-1:])
    }
    assert sorted(rates.values()) == [0.25, 0.5]


@pytest.mark.parametrize(
    "name, options, values",
    [
        ("constant", {}, [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
        ("warmup_linear", {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("warmup_linear", {"warmup_steps": 1}, [1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0]),
        ("warmup_linear", {"warmup_steps": 0}, [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
        ("cosine", {}, [(1 + np.cos(np.pi * n / 8)) / 2 for n in range(9)]),
        (
            "cosine",
            {"warmup_steps": 4},
            [0.25, 0.5, 0.75, 1, 1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0],
        ),
        ("exponential", {"gamma": 0.9}, [1, 1, 1, 0.9, 0.9, 0.9, 0.81, 0.81, 0.81]),
        ("inverse_sqrt", {}, [1 / np.sqrt(n) for n in range(1, 10)]),
        ("inverse_sqrt", {"warmup_steps": 4}, [0.5] * 4 + [1 / np.sqrt(n) for n in range(5, 10)]),
    ],
)
def test_schedules(name, options, values):
    schedule = make_schedule(SCHEDULES[name](**options), total=8, epoch=3)
    actual = [float(schedule(jnp.int32(step))) for step in range(9)]
    np.testing.assert_allclose(actual, values, rtol=1e-6, atol=1e-7)


TOTAL = 9  # a reciprocal that is not exact
IN_THE_PROGRAM = {  # as optax makes them
    "linear": ({}, optax.linear_schedule(1.0, 0.0, TOTAL)),
    "cosine": ({}, optax.cosine_decay_schedule(1.0, TOTAL)),
    "warmup_linear": (
        {"warmup_steps": 3},
        optax.join_schedules(
            [optax.linear_schedule(1 / 3, 1.0, 2), optax.linear_schedule(1.0, 0.0, TOTAL - 3)], [3]
        ),
    ),
    "inverse_sqrt": ({"warmup_steps": 3}, lambda step: 1.0 / jnp.sqrt(jnp.maximum(step + 1.0, 3))),
    "exponential": ({}, lambda step: 0.95 ** (step // 2).astype(jnp.float32)),
    "constant": ({}, optax.constant_schedule(1.0)),
}


@pytest.mark.parametrize(
    "optimizer, name", [*itertools.product(["adamw"], IN_THE_PROGRAM), ("adafactor", "cosine")]
)
def test_constants_that_are_arguments_change_no_bit_of_an_update(optimizer, name):
    options, in_program = IN_THE_PROGRAM[name]
    schedule = make_schedule(SCHEDULES[name](**options), total=TOTAL, epoch=2)
    grads = [GRADS[i % 3] for i in range(TOTAL + 1)]
    expected = run(make_optimizer(optimizer, in_program, EQUAL, weight_decay=0.1), grads)
    tx = make_optimizer(optimizer, schedule, EQUAL, weight_decay=0.1)
    for constants in ({}, {"constants": schedule.constants}):
        actual = run(tx, grads, **constants)
        assert all(np.array_equal(actual[part], expected[part]) for part in PARAMS)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_runs_of_other_lengths_have_the_same_program(name):
    texts = set()
    for total in (60, 97):
        schedule = make_schedule(SCHEDULES[name](), total=total, epoch=total // 3)
        tx = make_optimizer("adamw", schedule, EQUAL)
        arguments = GRADS[0], tx.init(PARAMS), PARAMS
        traced = jax.jit(tx.update).trace(*arguments, constants=schedule.constants)
        for platform in ("cpu", "cuda", "tpu"):
            texts.add((platform, traced.lower(lowering_platforms=(platform,)).as_text()))
    assert len(texts) == 3


@pytest.mark.parametrize(("fields", "first"), [
    ({"warmup_ratio": 0.25}, [1 / 2, 1, 1]),
    ({"warmup_ratio": 0.25, "warmup_steps": 4}, [1 / 4, 2 / 4, 3 / 4]),
    ({"warmup_ratio": 0.99}, [1 / 7, 2 / 7, 3 / 7]),  # 8 of 8 steps when rounded
    ({}, [1, 7 / 8, 6 / 8]),
])  # fmt: skip
def test_warmup_is_a_number_of_steps_or_a_share_of_them(fields, first):
    from jaxprompt.build.optimizer import build_optimizer
    from jaxprompt.config.load import load_config
    from jaxprompt.training.loop import Milestones

    schedule = {"name": "warmup_linear", **fields}
    config = load_config("base").replace({"optim.schedule": schedule, "optim.lr": 1.0})
    params = {"prompt/x": jnp.zeros(())}
    tx = build_optimizer(config, params, Milestones(8, 1, 0), 1)
    state, rates = tx.init(params), []
    for _ in first:
        _, state = tx.update(params, state, params)
        rates.append(float(learning_rates(state)["prompt"]))
    np.testing.assert_allclose(rates, first, rtol=1e-6)


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(InputError, match="schedule.warmup_steps=8 must be less than the 8"):
        make_schedule(WarmupLinear(warmup_steps=8), total=8, epoch=1)


def test_each_part_that_trains_has_its_rate():
    rates = {"head": 0.0, "backbone": None}
    assert lr_by_part({"prompt", "head"}, 0.1, rates) == {"head": 0.0, "prompt": 0.1}
    with pytest.raises(InputError, match=r"optim.lr_backbone=1e-05, but no"):
        lr_by_part({"prompt", "head"}, 0.1, {"head": None, "backbone": 1e-5})
