"""A mesh changes where parameters are and in which order sums are computed, nothing else."""

import dataclasses
import functools
import itertools
import re
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tiny import CONFIGS, MIXTURE, QUICK, assert_close, make_batch, make_params, make_tiny

from jaxprompt.config.run import Schedule
from jaxprompt.errors import InputError
from jaxprompt.heads import verbalizer
from jaxprompt.models.model import Model, backbone_shapes
from jaxprompt.models.sampling import Sampling, make_row_keys
from jaxprompt.parallel import sharding
from jaxprompt.parallel.sharding import (
    PARAMETERS,
    Placement,
    check_divisible,
    check_padding,
    constrain,
    make_placement,
    put_batch,
    put_flag,
    put_global,
    with_placement,
)
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import make_loss
from jaxprompt.training.evaluation import compile_step
from jaxprompt.training.optim import make_optimizer, make_schedule
from jaxprompt.training.state import make_state, place_state
from jaxprompt.training.steps import make_eval_step, make_generate_step, make_train_step, with_flags
from jaxprompt.tree import flatten, split_trainable, trainable_mask, unflatten
from jaxprompt.types import Objective

HEADS = {
    "bert": dict(num_attention_heads=4), "t5": dict(num_heads=4), "gpt2": dict(n_head=4),
    "llama": {},  # four heads, which share two of keys
}  # fmt: skip
MESHES = {
    "data": (8, 1, False),
    "model": (1, 4, False),
    "both": (2, 4, False),
    "fsdp": (8, 1, True),
    "all": (4, 2, True),
}
VOCAB = 53  # a prime: always padded where the model axis is not 1
KEEP_GRADIENT = optax.chain(optax.trace(decay=0.0), optax.sgd(0.5))  # its state is the gradient


class Case(NamedTuple):
    """A model, its parameters on one device, and a train step."""

    model: Model
    trainable: dict
    frozen: dict
    step: object
    batch: object


def make_case(
    family, method, *, stack="scan", remat="none", patterns=None, accumulate=1, **changes
):
    backbone, weights = make_tiny(family, stack=stack, remat=remat, **HEADS[family], **changes)
    more = dict(decoder=2, cross=2) if family == "t5" and method == "prefix" else {}
    prompt = make_prompt(method, backbone.dims, length=3, **more)
    words = np.arange(3)
    scores = "full" if method == "soft" else "restricted"
    head = verbalizer.LabelWords(words + 4, words[:, None, None], 0 * words[:, None, None], scores)
    model = Model(backbone, prompt, {"main": head})
    params = make_params(model, weights)
    parts = split_trainable(params, trainable_mask(params, patterns or (r"prompt/.*",)))
    objectives = [Objective("main", make_loss(scores, 0.0))]
    step = make_train_step(model, KEEP_GRADIENT, objectives, accumulate=accumulate)
    batch = make_batch(
        slots=prompt.num_slots(), shift=prompt.position_shift(), family=family,
        decoder_slots=prompt.num_decoder_slots(), decoder_shift=prompt.decoder_shift(),
    )  # fmt: skip
    return Case(model, *parts, step, batch)


def on_mesh(case: Case, placement: Placement) -> Case:
    """Pads the vocabulary and makes the step of the padded model."""
    rows = placement.padded_vocab(VOCAB)
    cfg = dataclasses.replace(case.model.backbone.cfg, rows=rows)
    model = dataclasses.replace(case.model, backbone=case.model.backbone.clone(cfg=cfg))
    shapes = backbone_shapes(model.backbone)

    def pad(name, leaf):
        if name not in shapes or leaf.shape == shapes[name].shape:
            return leaf
        widths = [(0, new - old) for new, old in zip(shapes[name].shape, leaf.shape, strict=True)]
        return jnp.pad(leaf, widths)

    frozen = {name: pad(name, leaf) for name, leaf in case.frozen.items()}
    scores = case.model.heads["main"].scores
    step = make_train_step(model, KEEP_GRADIENT, [Objective("main", make_loss(scores, 0.0))])
    return case._replace(model=model, frozen=frozen, step=step)


def run_alone(case: Case):
    state = make_state(jax.tree.map(jnp.copy, case.trainable), KEEP_GRADIENT, jax.random.key(1))
    return jax.jit(case.step, compiler_options=QUICK)(state, case.frozen, case.batch)


def compile_on(case: Case, placement: Placement):
    """Compiles a step on a mesh. -> the program, its arguments"""
    state = place_state(placement, case.trainable, KEEP_GRADIENT, jax.random.key(1))
    frozen = put_global(case.frozen, placement.param_shardings(case.frozen))
    args = state, frozen, put_batch(placement, case.batch)
    step = jax.jit(with_placement(placement, case.step), compiler_options=QUICK)
    return step.lower(*args).compile(), args


@pytest.fixture(scope="module", params=["bert", "t5", "gpt2", "llama"])
def family(request):
    return request.param


@functools.cache
def unsharded(family, method):
    case = make_case(family, method)
    return case, run_alone(case)


MESH_CASES = [("prefix", mesh) for mesh in ("model", "both", "fsdp", "all")]
MESH_CASES += [("soft", mesh) for mesh in ("data", "all")]


@pytest.mark.default_cases("llama-prefix-both")
@pytest.mark.parametrize("method, mesh", MESH_CASES)
def test_loss_and_gradients_are_those_of_one_device(family, method, mesh):
    case, (state, metrics) = unsharded(family, method)
    data, model, fsdp = MESHES[mesh]
    placement = make_placement(data, model, fsdp=fsdp)
    case = on_mesh(case, placement)
    program, args = compile_on(case, placement)
    result, result_metrics = program(*args)
    assert_close(result_metrics, metrics)
    assert_close(result.opt_state[0].trace, state.opt_state[0].trace)
    assert_close(result.trainable, state.trainable)
    shared = r".*/(key|value)/kernel" if family == "llama" and model == 4 else "none"
    check_bytes(args[1], data, model, fsdp, shared)
    for leaf in jax.tree.leaves(args[0].trainable):
        assert leaf.sharding.is_fully_replicated
    if data == 1 or not fsdp:
        check_collectives(program.as_text(), mesh)


@pytest.mark.default_cases("both")
@pytest.mark.parametrize("mesh", ["model", "both", "all"])
def test_experts_are_divided_over_the_model_axis(mesh):
    data, model, fsdp = MESHES[mesh]
    placement = make_placement(data, model, fsdp=fsdp)
    case = make_case("llama", "prefix", **MIXTURE)
    state, metrics = run_alone(case)
    program, args = compile_on(on_mesh(case, placement), placement)
    result, result_metrics = program(*args)
    assert_close(result_metrics, metrics)
    assert_close(result.opt_state[0].trace, state.opt_state[0].trace)
    shared = r".*/(key|value)/kernel" if model == 4 else "none"
    check_bytes(args[1], data, model, fsdp, shared)
    if not fsdp:  # besides sums, only the gradients of the router's weights, [B, T, E]
        text = program.as_text()
        gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)
        assert {shape.split(",")[-1] for shape in gathered} == {"4"}
        check_collectives(text.replace(" all-gather(", " all-reduce("), mesh)


# Tensors that are sharded over the model axis, and with FSDP over the data axis.
COLUMNS = (
    r".*layers/.*(/(position_)?(query|key|value|out|up|gate|down)/kernel|/in_proj/kernel"
    r"|/(position_)?(query|key|value|up|gate)/bias)"
)
TABLES = r".*(word|lm|mlm|bias)/table|.*mlm/bias|.*lm_bias"
ROWS = r".*layers/.*kernel|.*(word|lm)/table"


def check_bytes(frozen, data, model, fsdp, shared="none"):
    """Asserts the bytes of each tensor on each device; `shared` ones are replicated."""
    divided = 0
    for name, leaf in frozen.items():
        parts = model if re.fullmatch(COLUMNS, name) or re.fullmatch(TABLES, name) else 1
        parts = 1 if re.fullmatch(shared, name) else parts
        parts *= data if fsdp and re.fullmatch(ROWS, name) else 1
        divided += parts > 1
        for shard in leaf.addressable_shards:
            assert shard.data.nbytes * parts == leaf.nbytes, name
    assert divided >= 6 or (model == 1 and not fsdp)


def check_collectives(text, mesh):
    """Asserts that only sums of activations and of prompt gradients are communicated."""
    kinds = set(re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all)\(", text))
    assert kinds == {"all-reduce"}, (mesh, kinds)


@pytest.mark.default_cases("llama-soft-trained")
@pytest.mark.parametrize("patterns", [(), (r"backbone/.*",)], ids=["frozen", "trained"])
@pytest.mark.parametrize("method", ["soft", "prefix"])
def test_no_gradient_of_a_frozen_weight_exists(family, method, patterns):
    """Such a gradient is a product of the shape of its kernel; trained, all of them are there."""
    placement = make_placement(2, 1)
    case = make_case(family, method, patterns=(r"prompt/.*", *patterns))
    # 5 rows a device: with as many as there are heads, states would have the shape of a kernel.
    case = case._replace(batch=jax.tree.map(lambda x: np.concatenate([x, x[:2]]), case.batch))
    text = compile_on(case, placement)[0].as_text()
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", text)
    squeeze = lambda dims: tuple(sorted(n for n in dims if n != 1))
    products = {squeeze(map(int, dims.split(","))) for dims in shapes}
    kernels = [
        leaf.shape[1:]
        for name, leaf in (case.trainable | case.frozen).items()
        if re.fullmatch(r"backbone/.*layers/.*kernel", name)
    ]
    assert products and kernels
    for kernel in kernels:  # heads and their width may have become one axis
        forms = {squeeze(kernel), squeeze((kernel[0], int(np.prod(kernel[1:]))))}
        forms.add(squeeze((int(np.prod(kernel[:-1])), kernel[-1])))
        assert bool(products & forms) == bool(patterns), kernel


@pytest.mark.long
@pytest.mark.parametrize(
    "stack, remat, mesh", [("scan", "dots", "both"), ("scan", "mlp", "all"),
                           ("unroll", "dots", "all"), ("unroll", "full", "both")],
)  # fmt: skip
def test_every_way_to_run_a_stack_is_one_computation_on_a_mesh(stack, remat, mesh):
    placement = make_placement(*MESHES[mesh][:2], fsdp=MESHES[mesh][2])
    alone = make_case("t5", "prefix", stack=stack, remat=remat)
    state, metrics = run_alone(alone)
    program, args = compile_on(on_mesh(alone, placement), placement)
    result, result_metrics = program(*args)
    assert_close(result_metrics, metrics)
    assert_close(result.opt_state[0].trace, state.opt_state[0].trace)


def test_a_trained_backbone_and_its_optimizer_are_divided_like_a_frozen_one():
    placement = make_placement(4, 2, fsdp=True)
    case = make_case("bert", "prefix", patterns=(r"prompt/.*", r"backbone/layers/.*"))
    state, metrics = run_alone(case)
    program, args = compile_on(on_mesh(case, placement), placement)
    result, result_metrics = program(*args)
    assert_close(result_metrics, metrics)
    assert_close(result.trainable, state.trainable)
    for tree in (args[0].trainable, args[0].opt_state[0].trace):
        kernel = tree["backbone/layers/mlp/up/kernel"]
        assert kernel.addressable_shards[0].data.shape == (2, 4, 12)
        assert tree["prompt/table"].sharding.is_fully_replicated


@pytest.mark.long
def test_accumulated_parts_stay_divided_over_the_data_axis():
    placement = make_placement(2, 1)
    one_batch, parts = (make_case("bert", "prefix", accumulate=n) for n in (1, 4))
    expected = run_alone(one_batch)
    program, args = compile_on(parts, placement)
    result = program(*args)
    assert_close(result[1], expected[1])
    assert_close(result[0].trainable, expected[0].trainable)
    assert not re.search("all-to-all|collective-permute", program.as_text())  # no row is sent


def test_padding_of_the_vocabulary_is_never_predicted():
    case = make_case("gpt2", "soft")
    placement = make_placement(1, 4)
    padded = on_mesh(case, placement)
    assert padded.frozen["backbone/embed/word/table"].shape[0] == 56
    scores = jax.jit(make_eval_step(case.model))(case.trainable, case.frozen, case.batch)
    # Rows that would win if they were read.
    table = padded.frozen["backbone/embed/word/table"]
    frozen = padded.frozen | {"backbone/embed/word/table": table.at[VOCAB:].set(100.0)}
    frozen = put_global(frozen, placement.param_shardings(frozen))
    step = jax.jit(with_placement(placement, make_eval_step(padded.model)))
    assert_close(step(case.trainable, frozen, put_batch(placement, case.batch)), scores)


@pytest.mark.long
@pytest.mark.parametrize(
    "writer, num_beams, mesh", [("t5", 3, (2, 4, False)), ("gpt2", 1, (4, 2, True)),
                            ("gpt2", 3, (2, 4, False)), ("gpt2", 0, (2, 4, False))]
)  # fmt: skip
def test_texts_are_those_of_one_device(writer, num_beams, mesh):
    """Beams are folded into rows, caches are written in place, the vocabulary is padded.

    0 beams are samples, whose keys are those of the rows.
    """
    case = make_case(writer, "prefix")
    settings = dict(max_new_tokens=5, eos=1, pad=0, num_beams=num_beams or 1)
    keys = () if num_beams else (make_row_keys(0),)
    if keys:
        settings["sampling"] = Sampling(1.0, top_k=40, top_p=0.95, repetition_penalty=1.1)
    expected = jax.jit(make_generate_step(case.model, **settings))(
        case.trainable, case.frozen, case.batch, None, *keys
    ).ids
    assert len(np.unique(expected)) > 3
    placement = make_placement(*mesh[:2], fsdp=mesh[2])
    moved = on_mesh(case, placement)
    step = compile_step(placement, make_generate_step(moved.model, **settings))
    frozen = put_global(moved.frozen, placement.param_shardings(moved.frozen))
    index, (ids, *_) = step(case.trainable, frozen, *keys)(case.batch)
    assert ids.sharding.is_fully_replicated
    np.testing.assert_array_equal(index, case.batch.index)
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.long_cases("t5")
def test_every_parameter_of_every_family_has_a_rule(any_family):
    backbone, _ = make_tiny(any_family)
    placement = make_placement(2, 2)
    for name, leaf in backbone_shapes(backbone).items():
        spec = placement.param_sharding(name, leaf.shape).spec
        assert (spec == PartitionSpec(*[None] * leaf.ndim)) == (
            re.fullmatch(f"{COLUMNS}|{TABLES}", name) is None
        ), name


# These two have the parameters of a Llama and of a GPT-2.
@pytest.fixture(
    params=[
        pytest.param(family, marks=[pytest.mark.long] * (family in ("gpt_neox", "opt")))
        for family in sorted(CONFIGS)
    ]
)
def any_family(request):
    return request.param


def test_an_unknown_parameter_has_no_rule():
    placement = make_placement(2, 1)
    assert placement.param_sharding("prompt/table", (1, 2, 3, 4, 5)).is_fully_replicated
    with pytest.raises(ValueError, match="no rule of sharding.PARAMETERS fits backbone/layers/x"):
        placement.param_sharding("backbone/layers/x/kernel", (2, 3, 4))
    with pytest.raises(ValueError, match="with 3 axes"):
        placement.param_sharding("backbone/embed/word/table", (2, 3, 4))
    assert len({rule for rule, _ in PARAMETERS}) == len(PARAMETERS)


def test_outside_of_a_mesh_nothing_is_constrained():
    x = jnp.ones((3, 4))
    assert constrain(x, "act_batch", "anything") is x
    alone = with_placement(make_placement(1, 1), lambda x: constrain(x, "act_batch", None))
    assert alone(x) is x
    odd = jax.jit(
        with_placement(make_placement(2, 2), lambda x: constrain(x, "act_batch", "act_vocab"))
    )
    assert odd(x).sharding.spec == PartitionSpec(None, "model")


def test_a_flag_raised_anywhere_is_seen():
    placement = make_placement(4, 2)
    step = with_flags(lambda state, frozen, batch: (state + frozen, batch))
    for flag in (False, True):
        result = jax.jit(step)(1, 2, 3, put_flag(placement, flag))
        assert list(map(int, result)) == [3, 3, flag]


@pytest.mark.parametrize(
    "sizes, expected", [((-1, 1), (8, 1)), ((-1, 4), (2, 4)), ((2, -1), (2, 4)), ((2, 2), (2, 2))]
)
def test_remaining_devices_are_used(sizes, expected):
    placement = make_placement(*sizes)
    assert tuple(placement.mesh.shape.values()) == expected
    assert placement.batch_part() == (0, 1)


def test_slices_divide_the_data_axis_alone():
    """Two slices of four devices: rows of the mesh are within a slice."""
    placement = make_placement(4, 2, slices=1)
    assert placement.mesh.devices.shape == (4, 2)

    class Device:
        def __init__(self, number):
            self.id, self.slice_index, self.process_index = number, number // 4, number // 4
            self.platform, self.device_kind, self.coords = "cpu", "made up", (number, 0, 0)

    grid = sharding.arrange_devices(4, 2, 2, [Device(i) for i in range(8)])
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    assert (slices == slices[:, :1]).all()  # the model axis never leaves a slice
    assert slices[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "name, shape",
    [
        ("backbone/mlm/bias", (52,)), ("backbone/layers/mlp/up/bias", (2, 24)),
        ("backbone/layers/mlp/up/kernel", (2, 128, 256)), ("backbone/embed/word/table", (52, 16)),
    ],
)  # fmt: skip
def test_the_sharding_of_adafactors_state(name, shape, scaled):
    """Factored moments have arrays of 1, which no axis divides."""
    placement = make_placement(1, 2)
    schedule = make_schedule(Schedule(), total=10, epoch=1)
    tx = make_optimizer("adafactor", schedule, {"backbone": 0.1}, scaled=scaled)
    params = put_global(
        {name: jnp.zeros(shape)}, placement.param_shardings({name: jnp.zeros(shape)})
    )
    state = place_state(placement, params, tx, jax.random.key(0))
    alone = make_state({name: jnp.zeros(shape)}, tx, jax.random.key(0))
    assert jax.tree.map(jnp.shape, state.opt_state) == jax.tree.map(jnp.shape, alone.opt_state)


def make_torus(kind, shape, host):
    """The TPUs of a torus; each process has a block of them of the shape `host`."""
    places = [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(shape)))]
    block = lambda place: tuple(a // b for a, b in zip(place, host, strict=True))
    processes = {part: number for number, part in enumerate(dict.fromkeys(map(block, places)))}
    places.sort(key=lambda place: processes[block(place)])
    return [
        types.SimpleNamespace(
            id=number, coords=place, process_index=processes[block(place)], core_on_chip=0,
            platform="tpu", device_kind=kind, slice_index=0,
        )
        for number, place in enumerate(places)
    ]  # fmt: skip


@pytest.mark.parametrize("model", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "kind, shape",
    [
        ("TPU v5 lite", (4, 4, 1)), ("TPU v5 lite", (4, 8, 1)), ("TPU v6 lite", (4, 4, 1)),
        ("TPU v4", (2, 2, 2)), ("TPU v4", (2, 2, 4)), ("TPU v5", (2, 2, 4)), ("TPU v4", (4, 4, 4)),
    ],
)  # fmt: skip
def test_each_process_of_a_torus_has_a_part_of_the_batch(kind, shape, model, monkeypatch):
    """All parts are read, each by the processes whose devices hold it."""
    devices = make_torus(kind, shape, (2, 2, 1))
    data = len(devices) // model
    grid = sharding.arrange_devices(data, model, 1, devices)
    placement = sharding.Placement(types.SimpleNamespace(devices=grid))
    read = np.zeros(data, int)
    processes = {device.process_index for device in devices}
    for process in processes:
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        part, parts = placement.batch_part()
        rows = slice(part * data // parts, (part + 1) * data // parts)
        rows_here = [any(d.process_index == process for d in row) for row in grid]
        assert rows_here == [rows.start <= number < rows.stop for number in range(data)]
        read[rows] += 1
    # Processes whose devices share rows read the same ones.
    assert read.min() == read.max() >= 1 and (model > 1 or read.max() == 1)


def test_a_process_without_a_part_of_its_own_is_refused(monkeypatch):
    """Rows of three devices over processes of two: the second row is half of each."""
    devices = lambda *processes: [
        types.SimpleNamespace(process_index=number) for number in processes
    ]
    grid = np.array([devices(0, 0, 1), devices(1, 2, 2)], object)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(InputError, match="mesh.data=2 x mesh.model=3 gives a process no"):
        sharding.Placement(types.SimpleNamespace(devices=grid)).batch_part()


def test_a_torus_whose_axes_do_not_make_up_the_mesh_is_split(monkeypatch):
    """64 x 4 on 16 x 16 TPUs: JAX asks first whether it may."""
    calls = []

    def create_device_mesh(shape, devices, **options):
        calls.append(options)
        if not options:
            raise NotImplementedError("Failed to find assignment for logical_axis_index 1")
        return np.array(devices).reshape(shape)

    monkeypatch.setattr(sharding.mesh_utils, "create_device_mesh", create_device_mesh)
    assert sharding.arrange_devices(4, 2, 1, jax.devices()).shape == (4, 2)
    assert calls == [{}, {"allow_split_physical_axes": True}]


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((3, 1), "mesh.data=3 x mesh.model=1 does not divide the 8 devices"),
        ((-1, 3), "mesh.data=-1 x mesh.model=3 does not divide the 8 devices"),
        ((16, 1), "mesh.data=16 x mesh.model=1 does not divide the 8 devices"),
        ((0, 1), "mesh.data=0 x mesh.model=1 does not divide the 8 devices"),
        ((-2, 1), "mesh.data=-2 x mesh.model=1 does not divide the 8 devices"),
        ((-1, -1), "only one of them can be -1"),
        ((8, 1, 3), "mesh.data=8 must be a multiple of mesh.slices=3"),
    ],
)
def test_invalid_meshes(sizes, words):
    slices = sizes[2] if len(sizes) == 3 else 1
    with pytest.raises(InputError, match=re.escape(words)):
        make_placement(*sizes[:2], slices=slices)


@pytest.mark.long_cases(
    "t5-changes1-sizes1-mesh.model=4 does not divide the 26 of .*mlp/.*; use 1 or 2$"
)
@pytest.mark.parametrize(
    "family, changes, sizes, words",
    [
        ("bert", {}, (1, 4, False),
         r"mesh.model=4 does not divide the 2 of backbone/layers/attention/.*; use 1 or 2$"),
        ("t5", dict(num_heads=4, d_ff=26), (1, 4, False),
         "mesh.model=4 does not divide the 26 of .*mlp/.*; use 1 or 2$"),
        ("gpt2", dict(n_head=4, n_embd=20), (8, 1, True),
         "mesh.data=8 does not divide the 20 of .*; use 1 or 2 or 4 or 5 or 10, or mesh.fsdp"),
        ("llama", dict(num_attention_heads=9, num_key_value_heads=3, head_dim=4), (1, 2, False),
         "mesh.model=2 does not divide the 3 of .*attention/key/.*; use 1 or 3$"),
        ("llama", dict(num_attention_heads=3, num_key_value_heads=1, head_dim=4), (1, 2, False),
         "mesh.model=2 does not divide the 3 of .*attention/.*; use 1 or 3$"),
        ("llama", MIXTURE | dict(num_local_experts=6), (1, 4, False),
         "mesh.model=4 does not divide the 6 of .*mlp/experts/.*; use 1 or 2 or 3 or 6$"),
    ],
)  # fmt: skip
def test_widths_that_do_not_divide(family, changes, sizes, words):
    backbone, _ = make_tiny(family, **changes)
    placement = make_placement(*sizes[:2], fsdp=sizes[2])
    cfg = dataclasses.replace(backbone.cfg, rows=placement.padded_vocab(VOCAB))
    with pytest.raises(InputError, match=words):
        check_divisible(placement, backbone_shapes(backbone.clone(cfg=cfg)))


def test_blocks_of_codes_that_do_not_divide():
    """The 96 numbers between the layers of an MLP divide by 2, and their 3 blocks do not."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=2, head_dim=32)
    backbone, _ = make_tiny("llama", **sizes, num_key_value_heads=2)
    placement = make_placement(4, 2)
    backbone = backbone.clone(
        cfg=dataclasses.replace(backbone.cfg, rows=placement.padded_vocab(VOCAB))
    )
    check_divisible(placement, backbone_shapes(backbone))
    words = "does not divide the 3 of .*mlp/.*; use 1 or 3, or backbone.quantize=none$"
    with pytest.raises(InputError, match=f"mesh.model=2 {words}"):
        check_divisible(placement, backbone_shapes(backbone, "int4"))
    check_divisible(placement, backbone_shapes(backbone, "int8"))


def test_a_table_that_trains_is_never_padded():
    placement = make_placement(2, 4)
    shapes = {"backbone/embed/word/table": np.zeros((56, 16)), "prompt/table": np.zeros((3, 4))}
    check_padding(placement, shapes, 56)
    with pytest.raises(
        InputError, match="mesh.model=4 does not divide its 54 rows; use 1 or 2 or 3, "
    ):
        check_padding(placement, shapes, 54)


def test_put_global_shards_every_leaf():
    placement = make_placement(2, 2)
    params = {"a/x": np.arange(8.0).reshape(4, 2), "b": np.ones(3)}
    arrays = put_global(params, {"a/x": placement.batch, "b": placement.replicated})
    assert unflatten(arrays)["a"]["x"].addressable_shards[0].data.shape == (2, 2)
    assert flatten({"b": arrays["b"]})["b"].sharding.is_fully_replicated
