"""Every step is lowered for GPUs and TPUs."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from lowering import (
    A100,
    CLASSES,
    ENCODER,
    H100,
    IPT,
    LEARNS,
    PLATFORMS,
    TPU,
    TX,
    V100,
    WEIGHTS,
    WORKS,
    Case,
    has_kernel,
    lower,
    lower_on,
    make_model,
    make_refill_step,
    make_shapes,
    place_for,
    products,
    shape_of,
)
from tiny import make_batch

from jaxprompt.backbones import families
from jaxprompt.build.placement import kernel_notes
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError
from jaxprompt.layers import kernels
from jaxprompt.layers.product import einsum
from jaxprompt.layers.quantized import as_matrices
from jaxprompt.layers.reading import GreedyScores
from jaxprompt.models.bank import (
    Bank,
    group_heads,
    stack_injections,
    writing_model,
    writing_params,
)
from jaxprompt.models.generation import Search
from jaxprompt.models.sampling import Sampling, make_row_keys
from jaxprompt.models.scorer import Backbone
from jaxprompt.models.text_keys import text_keys
from jaxprompt.parallel import row_exchange
from jaxprompt.parallel.sharding import DATA, MODEL, make_placement
from jaxprompt.runs.grid.batched_steps import (
    PerRun,
    RunsPlacement,
    make_group_prefixes,
    make_group_scores,
    make_group_step,
)
from jaxprompt.runs.shared_steps import TaskBatch, make_shared_step
from jaxprompt.serving.router import mean_states
from jaxprompt.training.evaluation import generation_step, shared_prefix_fn
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_eval_step, make_train_step
from jaxprompt.tree import flatten, unflatten

MESHES = ((1, 1, False), (2, 2, False), (2, 2, True))
LENGTHS = (1, 5, 16, 20)
WRITERS = ("gpt2", "t5", "glm", "llama", "bart", "gpt_neox", "opt", "t5gemma")
BARE = ("deberta", "deberta_v2", "t5gemma")  # their scores no kernel computes
# Those that came later come last: what each case is stays the same.
LATER = ("albert", "deberta", "deberta_v2", "modernbert", "glm", "llama", "distilbert", "bart")
LATEST = ("mpnet", "xlm_roberta_xl", "eurobert", "gpt_neox", "opt", "t5gemma")
FAMILIES = sorted(families(), key=lambda name: (name in LATEST, name in LATER))


def supports(family: str, work: str) -> bool:
    """Returns whether a backbone supports a work."""
    if work == "generate":
        return family in WRITERS
    if family in ("distilbert", "mpnet", "xlm_roberta_xl", "eurobert"):  # otherwise as BERT
        return work == "train"
    if family == "t5gemma" and work not in ("train", "evaluate", "grid"):
        return False
    if family in ("glm", "bart") and work == "adapt":
        return False
    return work != "pretrain" or family != "roberta"  # as BERT


def spread() -> list[Case]:
    """Combines every backbone and work with alternating values of everything else."""
    turns = zip(
        itertools.cycle((H100, TPU, A100)), itertools.cycle(("prefix", "soft")),
        itertools.cycle(LENGTHS), itertools.cycle((21, 24, 27, 32, 36)),
        itertools.cycle((0.0, 0.0, 0.1)), itertools.cycle(MESHES[1:] + MESHES[:1]),
    )  # fmt: skip
    cells = [(f, w) for f in FAMILIES for w in WORKS for _ in range(2) if supports(f, w)]
    return [
        Case(family, work, method, length, tokens + length * (method == "soft"), dropout, mesh,
             target=target)
        for (family, work), (target, method, length, tokens, dropout, mesh)
        in zip(cells, turns, strict=False)
    ]  # fmt: skip


# Cases that once failed on a GPU: odd lengths of prompts, texts and decoders, and grids.
ODD = [
    Case(family, length=length, tokens=tokens)
    for family, length, tokens in (
        ("bert", 5, 24), ("bert", 1, 24), ("bert", 16, 21), ("gpt2", 5, 24), ("t5", 5, 21),
        ("t5", 16, 24), ("gpt2", 1, 21),
    )
] + [Case("t5", "grid"), Case("bert", "grid", length=5), Case("gpt2", "grid", "soft", length=5),
     Case("gpt2", "grid", side="left"), Case("t5", "grid", mesh=(2, 2, False))]  # fmt: skip
TOKENS = [
    Case(family, work, length=length, tokens=21, head=head, mesh=mesh, target=target)
    for (family, work, length, mesh, target), head in itertools.product(
        (
            ("bert", "train", 5, MESHES[0], H100), ("roberta", "evaluate", 16, MESHES[1], TPU),
            ("electra", "grid", 5, MESHES[0], A100), ("bert", "predict", 20, MESHES[2], TPU),
        ),
        ("tags", "spans"),
    )
]  # fmt: skip
# Targets of texts, also of packed ones, behind a prefix and behind soft tokens that run once.
TARGETS = [
    Case("gpt2", length=5, tokens=27, head="text", packed=True),
    Case("llama", "train", "soft", tokens=24, head="text", packed=True, front=True, target=TPU),
    Case("t5", "evaluate", tokens=21, head="text", target=TPU),
    Case("llama", "evaluate", "soft", tokens=40, head="text"),
]
# Label rows, and the words that the fluency objective hides.
ROWS = [
    Case(family, work, "dart", length, 27, mesh=mesh, target=target, head="label_rows")
    for family, work, length, mesh, target in (
        ("bert", "train", 5, MESHES[0], H100), ("bert", "train", 3, MESHES[2], TPU),
        ("roberta", "grid", 3, MESHES[0], A100), ("electra", "train", 4, MESHES[1], H100),
        ("t5", "train", 3, MESHES[1], TPU), ("gpt2", "evaluate", 2, MESHES[0], H100),
    )
] + [
    Case("bert", "train", "dart", 3, 27, mesh=MESHES[1], target=H100, head="word_rows"),
    Case("gpt2", "grid", "dart", 2, 27, target=TPU, head="word_rows"),
]  # fmt: skip
# The last layer of a DeBERTa, run twice for what its label rows or its words read.
DECODERS = [
    Case(family, work, method, 3, 27, mesh=mesh, target=target, head=head, kind="mask_decoder")
    for family, work, method, mesh, target, head in (
        ("deberta_v2", "train", "dart", MESHES[0], H100, "label_rows"),
        ("deberta_v2", "pretrain", "prefix", MESHES[2], TPU, ""),
        ("deberta", "grid", "dart", MESHES[0], TPU, "label_rows"),
        ("deberta_v2", "adapt", "prefix", MESHES[1], H100, ""),
    )
]  # fmt: skip
# An LSTM and an MLP that compute soft tokens.
ENCODED = [
    Case("bert", "train", "p_tuning", 9, 32, mesh=MESHES[0], target=H100),
    Case("t5", "train", "p_tuning", 5, 29, mesh=MESHES[2], target=TPU),
    Case("gpt2", "grid", "p_tuning", 3, 27, target=A100),
    Case("roberta", "evaluate", "p_tuning", 5, 29, mesh=MESHES[1], target=TPU),
]
# Prompts that are computed from each text: rows of its words, or what an encoder makes of them.
READING = [
    Case("bert", "train", "ipt", 5, 27, mesh=MESHES[1], target=H100),
    Case("t5", "train", "ipt_lstm", 3, 27, mesh=MESHES[2], target=TPU),
    Case("gpt2", "grid", "ipt", 3, 27, target=A100),
    Case("roberta", "train", "ipt_added", 5, 29, mesh=MESHES[0], target=TPU),
    Case("bert", "evaluate", "ipt_cnn", 5, 29, mesh=MESHES[1], target=H100),
    Case("bert", "grid", "ipt", 3, 27, target=TPU, head="topics"),
    Case("bert", "train", "ipt_cnn", 3, 27, target=H100, head="topics"),
]
# A prefix and soft tokens side by side.
BESIDE = [
    Case("bert", "train", "compose", 5, 24, mesh=MESHES[0], target=H100),
    Case("t5", "train", "compose", 3, 27, mesh=MESHES[2], target=TPU),
    Case("gpt2", "grid", "compose", 3, 27, target=A100),
]
# Classes that stand in the input, with soft tokens, a prefix, or rows of their own.
LISTED = [
    Case("electra", work, method, length, 27, mesh=mesh, target=target, head="discriminator")
    for work, method, length, mesh, target in (
        ("train", "dpt", 5, MESHES[0], H100), ("train", "prefix", 3, MESHES[2], TPU),
        ("grid", "soft", 3, MESHES[0], A100), ("evaluate", "dpt", 4, MESHES[1], H100),
        ("predict", "soft", 3, MESHES[1], TPU),
    )
] + [
    Case("electra", work, "prefix", 5, 27, mesh=mesh, target=target, head="multi_spans")
    for work, mesh, target in (("train", MESHES[0], H100), ("grid", MESHES[0], TPU))
]  # fmt: skip
# Slots that a text lacks, label rows with a loss of their own.
PROBES = [
    Case("bert", "train", "bank", 5, 27, target=H100),
    Case("gpt2", "evaluate", "bank", 5, 28, mesh=MESHES[1], target=A100),
    Case("t5", "train", "bank", 3, 27, mesh=MESHES[2], target=TPU),
    Case("roberta", "train", "labels", 5, 27, target=A100),
    Case("t5", "grid", "labels", 3, 28, target=H100),
    Case("electra", "train", "labels", 5, 27, mesh=MESHES[1], target=TPU),
]
# Llamas of other kinds, whose windows and caps no kernel takes.
OTHERS = [
    Case("llama", work, method, 5, 27, mesh=mesh, target=target, kind=kind)
    for kind, work, method, mesh, target in (
        ("gemma2", "train", "prefix", MESHES[1], H100),
        ("gemma2", "train", "soft", MESHES[2], TPU),
        ("gemma2", "generate", "prefix", MESHES[0], H100),
        ("gemma3", "grid", "prefix", MESHES[0], TPU),
        ("gemma3", "train", "soft", MESHES[1], H100),
        ("gemma3", "generate", "soft", MESHES[0], TPU),
        # Neighbours rotate; norms of all heads, which a mesh divides; a part of a head rotates.
        ("cohere2", "train", "prefix", MESHES[1], H100),
        ("cohere2", "generate", "soft", MESHES[0], TPU),
        ("olmo3", "train", "soft", MESHES[1], TPU),
        ("olmo3", "generate", "prefix", MESHES[1], H100),
        ("phi3", "grid", "prefix", MESHES[0], H100),
        ("phi3", "generate", "soft", MESHES[0], TPU),
        ("qwen3", "train", "prefix", MESHES[1], H100),
        ("qwen3", "evaluate", "soft", MESHES[2], TPU),
        ("gpt_oss", "train", "prefix", MESHES[2], H100),
        ("gpt_oss", "train", "soft", MESHES[1], TPU),
        ("gpt_oss", "generate", "prefix", MESHES[0], H100),
        ("mixtral", "train", "prefix", MESHES[1], H100),
        ("mixtral", "train", "soft", MESHES[2], TPU),
        ("mixtral", "grid", "prefix", MESHES[0], H100),
        ("mixtral", "generate", "soft", MESHES[1], TPU),
    )
]
# Matrices that are codes.
CODES = [
    Case(family, work, method, length, 27, mesh=mesh, target=target, quantize=quantize)
    for family, work, method, length, mesh, target, quantize in (
        ("bert", "train", "prefix", 5, MESHES[0], H100, "int8"),
        ("llama", "train", "soft", 5, MESHES[2], TPU, "int4"),
        ("llama", "generate", "prefix", 5, MESHES[1], H100, "int4"),
        ("t5", "grid", "prefix", 3, MESHES[0], A100, "int8"),
        ("t5", "generate", "prefix", 3, MESHES[0], TPU, "int8"),
        ("gpt2", "evaluate", "soft", 3, MESHES[1], TPU, "int4"),
        ("modernbert", "train", "prefix", 5, MESHES[1], H100, "int4"),
        ("deberta_v2", "train", "prefix", 5, MESHES[0], TPU, "int8"),
        ("bert", "pretrain", "prefix", 5, MESHES[2], TPU, "int8"),
        ("llama", "pretrain", "soft", 5, MESHES[0], H100, "int4"),
    )
] + [
    Case("llama", "train", "soft", 5, 27, mesh=MESHES[1], target=H100, quantize="int8",
         kind="gemma2"),
]  # fmt: skip
# Layers that are separate arrays.
SEPARATE = [
    Case(family, work, "prefix", length, 27, mesh=mesh, target=target, quantize=quantize,
         separate=True)
    for family, work, length, mesh, target, quantize in (
        ("bert", "train", 5, MESHES[0], H100, "none"),
        ("t5", "train", 3, MESHES[0], H100, "int8"),
        ("llama", "generate", 5, MESHES[1], H100, "none"),
        ("t5", "generate", 3, MESHES[0], TPU, "none"),
        ("gpt2", "grid", 3, MESHES[0], A100, "none"),
        ("bert", "train", 5, MESHES[2], TPU, "none"),
    )
]  # fmt: skip
LONG = [
    Case(family, work, method, length, 512, mesh=mesh, target=TPU)
    for family, work, method, length, mesh in (
        ("bert", "train", "prefix", 5, (1, 1, False)), ("t5", "train", "prefix", 16, (2, 2, True)),
        ("gpt2", "train", "prefix", 20, (2, 2, False)), ("gpt2", "evaluate", "soft", 20, MESHES[0]),
        ("bert", "grid", "prefix", 16, (2, 1, False)), ("t5", "adapt", "prefix", 16, MESHES[0]),
        ("roberta", "train", "soft", 1, (2, 2, False)),
        ("llama", "train", "prefix", 16, (1, 4, False)),
    )
]  # fmt: skip


# What all rows begin with runs once.
FRONTS = [
    Case(family, work, "soft", length=n, mesh=mesh, target=target, front=True)
    for target in (H100, TPU)
    for family, work, n, mesh in (
        ("gpt2", "train", 16, (2, 2, False)), ("llama", "train", 5, (2, 2, True)),
        ("gpt2", "grid", 16, (1, 1, False)), ("llama", "generate", 16, (1, 1, False)),
        ("gpt2", "evaluate", 5, (2, 2, True)),
    )
]  # fmt: skip


# Texts that are samples.
SAMPLED = [
    Case("llama", "generate", "prefix", target=H100, sampled=True),
    Case("t5", "generate", "soft", 5, target=TPU, sampled=True),
    Case("gpt2", "generate", "soft", 5, mesh=(2, 2, False), target=TPU, sampled=True, front=True),
]


GROUPS = (
    ODD, TOKENS, TARGETS, ROWS, DECODERS, ENCODED, READING, BESIDE, LISTED, PROBES, OTHERS, CODES,
    FRONTS, SEPARATE, LONG, SAMPLED,
)  # fmt: skip
CASES = {str(case): case for case in itertools.chain(spread(), *GROUPS)}
# Every 40th backbone and work, and the first or the last case of each group; others are long.
DEFAULT = {str(case) for case in spread()[::40] if case.family not in LATEST}
DEFAULT |= {str(group[-(i % 2)]) for i, group in enumerate(GROUPS)}
DEFAULT |= {next(str(x) for x in spread() if x.family == "bart" and x.target == TPU)}


@pytest.mark.default_cases(*DEFAULT)
@pytest.mark.parametrize("name", CASES)
def test_every_step(name):
    check(CASES[name], lower(CASES[name]))


@pytest.mark.long_cases("t5-mlp", "t5-dots", "t5-full", "llama-full")
@pytest.mark.parametrize("remat", ["mlp", "dots", "full"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_only_whole_layers_run_attention_again(family, remat):
    """Of cuDNN's calls there is one in each direction and kind of layer."""
    case = Case(family, "train", "soft", target=H100, remat=remat)
    text = lower(case)
    check(case, text)
    backward = len(re.findall(r"__cudnn\$fmha\w*Backward", text))
    forward = len(re.findall(r"__cudnn\$fmha", text)) - backward
    assert backward and forward == backward * (1 + (remat == "full"))


@pytest.mark.long_cases("bert-none")
@pytest.mark.parametrize("family, remat", [("llama", "mlp"), ("bert", "none")])
def test_frozen_matrices_are_multiplied_in_float8(family, remat):
    """Forward with e4m3 inputs, backward with e5m2 gradients; no matrix is widened."""
    text = lower(Case(family, "train", "soft", 5, mesh=MESHES[1], quantize="fp8", remat=remat))
    pairs = re.findall(r"dot_general.*: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(f8\w+)>\)", text)
    assert set(pairs) == {("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f8E4M3FN")}
    assert not re.search(r"convert .*f8E4M3FN>\) -> tensor", text)
    with pytest.raises(InputError, match="fp8"):
        lower(Case(family, "train", "soft", 5, target=A100, quantize="fp8"))


@pytest.mark.parametrize("target", [H100, TPU], ids=lambda target: target.platform)
def test_the_front_of_a_pass(target):
    """It runs in a program of its own, before those of the batches."""
    case = Case("llama", "evaluate", "soft", 5, mesh=MESHES[2], target=target, front=True)
    model, _ = make_model(case)
    trainable, frozen, _ = make_shapes(case, model)
    place = place_for(target, (2, 2, True))
    text = lower_on(place, shared_prefix_fn(model), trainable, frozen)
    check(case, text)


@pytest.mark.parametrize("target, family", [(H100, "bert"), (TPU, "t5")])
def test_the_states_of_a_router(target, family):
    case = Case(family, "evaluate", mesh=MESHES[1], target=target)
    model, _ = make_model(case)
    _, frozen, batch = make_shapes(case, model)
    step = lambda frozen, batch: mean_states(model.backbone, frozen["backbone"], batch)
    check(case, lower_on(place_for(target, case.mesh), step, unflatten(frozen), batch))


@pytest.mark.parametrize("target", [H100, TPU], ids=lambda target: target.platform)
def test_scores_of_continuations(target):
    case = Case("llama", "evaluate", "soft", 5, target=target)
    model, _ = make_model(case)
    model = dataclasses.replace(model, heads={"main": GreedyScores()})
    trainable, frozen, batch = make_shapes(case, model)
    text = lower_on(place_for(target, case.mesh), make_eval_step(model), trainable, frozen, batch)
    check(case, text)


@pytest.mark.parametrize("target", [H100, TPU], ids=lambda target: target.platform)
def test_the_front_of_a_grid(target):
    """Of two runs on the data axis: the front in one program, the scores of a batch in another."""
    case = Case("gpt2", "evaluate", "soft", 5, mesh=MESHES[1], target=target, front=True)
    model, _ = make_model(case)
    trainable, frozen, batch = make_shapes(case, model)
    many = lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    trainable, per_run = jax.tree.map(many, trainable), PerRun({}, {})
    place = place_for(target, (2, 2, False), maps_runs=True)
    at = RunsPlacement(**vars(place))
    front = make_group_prefixes(model, axis=DATA)
    scores = make_group_scores(model, is_shared=True, axis=DATA)
    prefixes = jax.eval_shape(front, trainable, frozen, per_run)
    for step, arguments in ((front, (trainable, frozen, per_run)),
                        (scores, (trainable, frozen, batch, per_run, prefixes))):  # fmt: skip
        text = lower_on(at, step, *arguments)
        check(case, text)


@pytest.mark.parametrize("target", [H100, TPU], ids=lambda target: target.platform)
def test_runs_that_share_the_states_of_a_batch(target):
    """The states of layer 1 are there once for both runs, which train the layers above it."""
    case = Case("bert", "grid", "prefix", 5, target=target)
    model, objectives = make_model(case)
    trainable, frozen, batch = make_shapes(case, model)
    cfg = dataclasses.replace(model.backbone.cfg, skip=1)
    # The one layer that is left runs whole, as no kernel is for few queries.
    model = dataclasses.replace(model, backbone=model.backbone.clone(cfg=cfg), last_layer="all")
    state = jax.eval_shape(lambda x: make_state(x, TX, jax.random.key(0)), trainable)
    many = lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    state, runs = jax.tree.map(many, (state, batch))
    states = (*batch.encoder.ids.shape, model.backbone.dims.width)
    runs = runs._replace(cached=jax.ShapeDtypeStruct(states, jnp.bfloat16))
    place = place_for(target, (1, 1, False), maps_runs=True)
    step = make_group_step(model, TX, objectives, shares_states=True)
    text = lower_on(place, step, state, frozen, runs, PerRun({}, {}))
    check(case, text)


@pytest.mark.parametrize("target", [H100, TPU], ids=lambda target: target.platform)
def test_states_that_processes_exchange(target):
    place = make_placement(4, 2)
    spread = NamedSharding(place.mesh, PartitionSpec((DATA, MODEL)))
    states = jax.ShapeDtypeStruct((16, 24, 32), jnp.bfloat16, sharding=spread)
    places = jax.ShapeDtypeStruct((12,), jnp.int32, sharding=place.replicated)
    traced = jax.jit(row_exchange._pick, out_shardings=place.batch).trace(states, places)
    text = traced.lower(lowering_platforms=(PLATFORMS[target.platform],)).as_text()
    assert "stablehlo.gather" in text and "callback" not in text


@pytest.mark.default_cases("bert-mesh0-target0")
@pytest.mark.parametrize("family, mesh, target", [
    ("bert", MESHES[1], H100), ("gpt2", MESHES[2], TPU), ("t5", MESHES[0], TPU),
])  # fmt: skip
def test_dropout_by_the_own_generator_of_a_device(family, mesh, target):
    case = Case(family, dropout=0.1, mesh=mesh, target=target, rng="rbg")
    text = lower(case)
    assert "stablehlo.rng_bit_generator" in text
    assert "stablehlo.rng_bit_generator" not in lower(dataclasses.replace(case, rng="threefry"))
    check(case, text)


@pytest.mark.default_cases(
    "gpu-bert", "gpu-gpt2", "gpu-llama", "tpu-bert", "tpu-gpt2", "tpu-glm", "tpu-llama"
)
@pytest.mark.parametrize(
    "target, family",
    [
        pytest.param(target, family, id=f"{target.platform}-{family}")
        for target, family in itertools.product((H100, TPU), FAMILIES)
    ],
)
def test_prefixes_start_from_texts(target, family):
    """Of an odd length, on a mesh."""
    case = Case(family, mesh=MESHES[2], target=target)
    module = make_model(case)[0].backbone
    place = place_for(target, (2, 2, True))
    batch = make_batch(rows=2, family=family)
    init = lambda key: module.init(key, batch, method="init_all")["params"]
    shapes = jax.eval_shape(init, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((5,), "int32")
    check_alone(lower_on(place, functools.partial(text_keys, module), shapes, ids))


@pytest.mark.parametrize("target", [H100, TPU], ids=["gpu", "tpu"])
@pytest.mark.parametrize("method", ["soft", "prefix", "p_tuning", "ipt", "dart"])
def test_what_a_prompt_adds(target, method):
    """Alone, as it is folded for an export, looked at and put into a bank."""
    model = make_model(Case("bert", "evaluate", method, 3, target=target))[0]
    batch = make_batch(rows=2, family="bert")

    def draw(key):
        backbone = model.backbone.init(key, batch, method="init_all")["params"]
        return model._init_params(key, backbone, 1) | {"backbone": backbone}

    shapes = jax.eval_shape(draw, jax.random.key(0))
    check_alone(lower_on(place_for(target, MESHES[0]), model.inject, shapes, batch))


@pytest.mark.long_cases("target2-t5")
@pytest.mark.parametrize("target, family", [(H100, "bert"), (TPU, "gpt2"), (TPU, "t5")])
def test_a_bank_of_prompts(target, family):
    """Of soft tokens, a prefix and label words, on a mesh."""
    cases = [
        Case(family, "evaluate", method, length, target=target, head=head)
        for method, length, head in (("soft", 3, ""), ("prefix", 5, ""), ("dart", 3, "label_rows"))
    ]
    models = [make_model(case)[0] for case in cases]
    place = place_for(target, (2, 2, True))
    batch = make_batch(rows=4, family=family)._replace(prompt=jnp.array([0, 1, 2, 0]))

    def run(key, batch):
        backbone = models[0].backbone.init(key, batch, method="init_all")["params"]
        params = [model._init_params(key, backbone, 1) | {"backbone": backbone} for model in models]
        injections = [model.inject(p, batch) for model, p in zip(models, params, strict=True)]
        heads = [model.heads["main"] for model in models]
        head_params = [p["head"]["main"] for p in params]
        rows = [injection.rows for injection in injections]
        kinds, grouped_params, _ = group_heads(heads, head_params, rows)
        scores = Bank(models[0].backbone, kinds).scores(
            params[0], stack_injections(injections), grouped_params, batch
        )
        assert len(scores) == 2
        return scores

    check_alone(lower_on(place, run, jax.random.key(0), batch))


@pytest.mark.long_cases("target1-t5-*")
@pytest.mark.parametrize(
    "target, family, make, mesh",
    [(H100, "llama", make_refill_step, MESHES[0]), (TPU, "t5", generation_step, MESHES[1])],
)
def test_a_bank_that_generates(target, family, make, mesh):
    """Samples of soft tokens and a prefix: rows that are replaced, and whole texts on a mesh."""
    models = [
        make_model(Case(family, "generate", method, length, target=target))[0]
        for method, length in (("soft", 3), ("prefix", 5))
    ]
    batch = make_batch(rows=4, family=family)._replace(prompt=jnp.array([0, 1, 1, 0]))
    search, keys = Search(4, (1,), 0, sampling=Sampling(1.0, 20)), make_row_keys(0)

    def run(key, batch):
        backbone = models[0].backbone.init(key, batch, method="init_all")["params"]
        params = [model._init_params(key, backbone, 1) | {"backbone": backbone} for model in models]
        injections = [model.inject(p, batch) for model, p in zip(models, params, strict=True)]
        step = make(writing_model(models[0].backbone), search)
        bank_params = writing_params(params[0], stack_injections(injections))
        return step({}, bank_params, batch._replace(number=batch.index), None, keys)

    check_alone(lower_on(place_for(target, mesh), run, jax.random.key(0), batch))


@pytest.mark.parametrize("target, task", [(H100, "a"), (TPU, "b")])
def test_steps_of_tasks_that_share_a_prompt(target, task):
    """On a mesh; each task's step is a program."""
    model, terms = make_model(Case("bert", target=target))
    model = dataclasses.replace(model, heads=dict.fromkeys("ab", model.heads["main"]))
    place = place_for(target, (2, 2, True))
    batch = make_batch(rows=4)

    def init(key):
        backbone = model.backbone.init(key, batch, method="init_all")["params"]
        return flatten(model._init_params(key, backbone, 1)), flatten({"backbone": backbone})

    trainable, frozen = jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(lambda x: make_state(x, TX, jax.random.key(0)), trainable)
    step = make_shared_step(
        {name: make_train_step(model, TX, [terms[0]._replace(head=name)]) for name in "ab"}
    )
    check_alone(lower_on(place, step, state, frozen, TaskBatch(batch, task)))


@pytest.mark.default_cases("electra", "glm", "gpt2", "llama")
@pytest.mark.parametrize("family", families())
def test_weights_are_drawn_on_gpus(family):
    """Where `adapt` makes a backbone from nothing, or a checkpoint lacks a head."""
    case = Case(family)
    module, _ = make_model(case)
    batch = make_batch(rows=2, family=family)
    init = lambda key: module.backbone.init(key, batch, method="init_all")["params"]
    assert "fmha" not in lower_on(place_for(H100, MESHES[0]), init, jax.random.key(0))


@pytest.mark.long_cases(
    "gpu-bert-train-prefix16-T24-1x1-True",
    "gpu-bert-train-prefix16-T24-1x1-dropout-False",
    "tpu-bert-train-prefix16-T24-1x1-True",
)
@pytest.mark.parametrize(
    "case, expected",
    [
        (Case(), True), (Case(target=V100), False), (Case(attention="einsum"), False),
        (Case(dropout=0.1), False), (Case(work="evaluate", dropout=0.1), True),
        (Case(dropout=0.1, attention_dropout=0.0), True),
        (Case(target=TPU, tokens=64), False), (Case(target=TPU, attention="fused"), True),
    ],
    ids=str,
)  # fmt: skip
def test_attention_is_a_kernel(case, expected):
    assert has_kernel(lower(case)) == expected


@pytest.mark.default_cases(
    "gpu-*",
    "tpu-llama-train-prefix5-T512-1x1-mistral-True",
    "tpu-modernbert-train-soft5-T512-1x1-True",
)
@pytest.mark.parametrize(
    "case, promised",
    [
        # A window as wide as prefix and text, and one that is narrower by a token.
        (Case("llama", "train", "prefix", 5, 512, target=TPU, kind="mistral"), True),
        (Case("llama", "train", "prefix", 6, 512, target=TPU, kind="mistral"), True),
        (Case("llama", "train", "prefix", 6, 512, kind="mistral"), True),
        (Case("llama", "train", "soft", 5, 512, target=TPU, kind="gemma3"), True),
        (Case("llama", "grid", "prefix", 5, 512, target=TPU, kind="gemma3"), True),
        (Case("llama", "train", "prefix", 5, 512, mesh=MESHES[1], target=TPU, kind="gemma2"), True),
        (Case("llama", "train", "prefix", 5, 24, kind="gemma2"), False),  # capped scores
        (Case("modernbert", "train", "soft", 5, 512, target=TPU), True),
        (Case("modernbert", "grid", "prefix", 5, 512, target=TPU), True),
        (Case("modernbert", "train", "prefix", 5, 512, mesh=MESHES[2], target=TPU), True),
    ],
    ids=str,
)
def test_a_kernel_is_promised_where_it_is_taken(case, promised):
    model, _ = make_model(case)
    arguments = model.backbone.cfg, model.backbone.dims.head_dim, case.target, case.tokens
    assert kernels.has_fused_kernel(*arguments, has_dropout=False) == promised
    assert has_kernel(lower(case)) == promised


@pytest.mark.parametrize("length, window", [(5, 0), (6, 517)])
def test_cudnn_has_lengths_and_windows_of_its_own(length, window):
    """A window as wide as prefix and text is none."""
    text = lower(Case("llama", "train", "prefix", length, 512, kind="mistral"))
    assert "PADDING_CAUSAL" in text and "fmhaScaleBias" not in text
    assert set(re.findall(r"sliding_window_length\\22: (\d+)", text)) == {str(window)}


@pytest.mark.default_cases("gpu-t5-train*")
@pytest.mark.parametrize(
    "case, results",
    [
        (Case("t5", method="soft"), 4),  # of queries, keys and values, and a workspace
        (Case("t5", "grid", "soft", 5), 4),
        (Case(side="left"), 4),
        (Case("t5", "adapt", "none"), 5),
    ],
    ids=str,
)
def test_cudnn_returns_the_gradient_of_a_bias_that_trains(case, results):
    lines = lower(case).splitlines()
    calls = [line for line in lines if "__cudnn$fmhaScaleBiasSoftmaxBackward" in line]
    assert calls
    for line in calls:
        assert line.rpartition(" -> ")[2].count("tensor<") == results


def test_left_padding_is_a_bias_in_cudnn():
    """Left padding: to cuDNN a mask goes as a bias, and right padding as lengths alone."""
    scaled = "fmhaScaleBias"
    assert scaled in lower(Case(side="left")) and scaled not in lower(Case())
    assert scaled not in lower(Case("gpt2", method="soft"))
    for method in ("soft", "prefix"):
        assert "PADDING_CAUSAL" in lower(Case("gpt2", method=method))


@pytest.mark.parametrize("model, heads", [(2, 2), (4, 4)])
def test_cudnns_keys_are_divided_as_the_queries_are(model, heads):
    """Two heads of keys serve four; on four devices each has the keys of its own head."""
    case = Case("llama", mesh=(1, model, False))
    calls = [line for line in lower(case).splitlines() if "CustomSPMD" in line]
    assert len(calls) == 2  # forward and backward
    for line in calls:
        q, k, v = re.findall(r"tensor<([^>]*)>", line.rpartition(" : ")[2])[:3]
        assert shape_of(q) == (8, 24 + case.length, 4, 8)
        assert shape_of(k) == shape_of(v) == (8, 24 + case.length, heads, 8)


@pytest.mark.parametrize("target, call", [(H100, "gpu.triton"), (TPU, "tpu_custom_call")])
@pytest.mark.parametrize("bits", [8, 4])
def test_few_rows_and_blocks_of_codes_are_a_kernel(bits, target, call):
    """On one device, in bfloat16, and with a gradient."""
    shape = lambda *sizes, dtype=jnp.float16: jax.ShapeDtypeStruct(sizes, dtype)
    planes = {"scale": shape(16, 128), "minimum": shape(16, 128)}
    planes["codes"] = shape(512 * bits // 8, 128, dtype=jnp.uint8)
    multiply = lambda x, planes: einsum("rk,kn->rn", x, as_matrices(planes))
    gradient = jax.grad(lambda *args: multiply(*args).astype(jnp.float32).sum())

    def lowered(function, rows=8, dtype=jnp.bfloat16, mesh=MESHES[0]):
        return lower_on(place_for(target, mesh), function, shape(rows, 512, dtype=dtype), planes)

    assert call in lowered(multiply)
    assert "dot_general" in lowered(gradient)
    for other in (dict(rows=65), dict(dtype=jnp.float32), dict(mesh=MESHES[1])):
        assert call not in lowered(multiply, **other)


def test_a_run_says_that_dropout_keeps_the_kernel_out():
    config, alone = load_config("base"), make_placement(1, 1, devices=jax.devices()[:1])
    on = lambda target: dataclasses.replace(alone, compiled_for=target)
    modules = [make_model(Case(dropout=rate))[0].backbone for rate in (0.1, 0.0)]
    dropped, whole = (Backbone(config.backbone, Path(), "bert", {}, module) for module in modules)
    (line,) = kernel_notes(config, on(H100), dropped)
    assert "attention dropout 0.1" in line and "--config.backbone.attention_dropout=0" in line
    assert kernel_notes(config, on(H100), whole) == kernel_notes(config, on(V100), dropped) == []
    assert kernel_notes(config, on(TPU), dropped) == kernel_notes(config, alone, dropped) == []
    config = config.replace({"data.max_len": 512})
    assert kernel_notes(config, on(TPU), dropped) == [line]


@pytest.mark.default_cases("gpu")
@pytest.mark.parametrize("target", [H100, TPU], ids=lambda target: target.platform)
def test_a_short_decoder_needs_no_keys_of_the_source(target):
    """Its queries, of 4 heads of 16, are mapped to the width of the encoder's states, 32."""
    text = lower(Case("t5", method="soft", mesh=MESHES[1], target=target, kind="wide_heads"))
    shapes = [tuple(map(shape_of, product)) for product in products(text)]
    assert ((32, 4, 16), (8, 5, 4, 16), (4, 32, 8, 5)) in shapes
    check_alone(text)


def check_alone(text: str) -> None:
    """Asserts what holds for programs without a step's products."""
    assert "callback" not in text and "f64" not in text


def check(case: Case, text: str) -> None:
    """Asserts what holds for every program."""
    if case.head == "topics":  # no backbone, so none of its kernels
        assert not has_kernel(text) and "callback" not in text
        return
    # Codes are arguments, and every product is of 16 bits, as without them.
    assert case.quantize == "none" or "i8>" in text
    promised = case.target.platform == "gpu" and not (case.dropout and case.work in LEARNS)
    promised &= case.family not in BARE and not case.kind.startswith(("gemma", "gpt_oss"))
    promised |= case.target == TPU and case.tokens == 512
    assert not promised or has_kernel(text)
    check_alone(text)
    for (left, right, result), _ in products(text).items():
        # The backward pass of splash attention sums outputs x gradients over a head.
        if shape_of(left) == shape_of(right) and shape_of(result) == shape_of(left)[:-1]:
            continue
        # A trained linear head alone is float32, and so are its products.
        by_head = CLASSES in shape_of(left) + shape_of(right) + shape_of(result)
        narrow = left.endswith("xbf16") and right.endswith("xbf16")
        # So is what computes a prompt.
        sizes = {*shape_of(left), *shape_of(right), *shape_of(result)}
        encodes = case.method in ("p_tuning", *IPT)
        by_prompt = encodes and not ENCODER.isdisjoint(sizes)
        alone = (by_head or by_prompt) and case.work != "adapt"
        assert narrow or alone, f"{left} x {right} -> {result}"
        # Merged rows can have the shape of a matrix; codes of 8 bits have no gradient.
        if case.work != "adapt" and case.quantize != "int8":
            assert _bare(shape_of(result), case) not in WEIGHTS, f"{left} x {right} -> {result}"


def _bare(shape: tuple[int, ...], case: Case) -> tuple[int, ...]:
    """Leaves the axis of runs out."""
    return shape[1:] if case.work == "grid" and len(shape) > 2 else shape
