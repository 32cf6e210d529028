"""Steps of tiny models, lowered for devices that are not there, and what their programs say."""

import contextlib
import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny import CONFIGS, MODEL_HEADS, make_batch

from jaxprompt import pretraining
from jaxprompt.backbones import make_backbone
from jaxprompt.group.program import Own, Apart, make_group_scores, make_group_step
from jaxprompt.heads import linear, lm
from jaxprompt.heads.pretraining import AnswerHead, TargetHead
from jaxprompt.losses import count_classes, count_hits, cross_entropy, free_text, make_loss, on_targets
from jaxprompt.model import Model, backbone_shapes
from jaxprompt.planning.compilers import standing_in
from jaxprompt.prompts import make_prompt
from jaxprompt.sharding import Target, make_placement, within
from jaxprompt.state import make_state
from jaxprompt.steps import Objective, make_eval_step, make_generate_step, make_train_step
from jaxprompt.tree import cast, split, trainable_mask, unflatten

GPU, TPU = Target("gpu", 9.0), Target("tpu")
AMPERE = Target("gpu", 8.0)
PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}
# Heads of 8, which cuDNN takes, and sizes of which no two are alike: a product tells its weight.
SIZES = {
    "gpt2": dict(n_embd=32, n_head=4, n_inner=40, n_positions=1024, vocab_size=56),
    "t5": dict(d_model=32, d_kv=8, num_heads=4, d_ff=40, vocab_size=56),
}
_ENCODER = dict(
    hidden_size=32, num_attention_heads=4, intermediate_size=40, vocab_size=56,
    max_position_embeddings=1024,
)  # fmt: skip
RUNS = 2
TX = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to lower."""

    family: str = "bert"
    work: str = "train"  # train | evaluate | predict | generate | grid | pretrain | adapt
    method: str = "prefix"
    length: int = 16  # of the prompt
    tokens: int = 24
    dropout: float = 0.0
    mesh: tuple = (1, 1, False)
    side: str = "right"
    target: Target = GPU
    dtype: str = "bfloat16"

    def __str__(self):
        data, model, fsdp = self.mesh
        words = [self.target.platform, self.family, self.work, self.method + str(self.length)]
        words += [f"T{self.tokens}", f"{data}x{model}" + "fsdp" * fsdp]
        return "-".join(words + ["dropout"] * (self.dropout > 0) + [self.side] * (self.side != "right"))


def make_model(case: Case):
    """Makes the model of a case, and the terms of its loss."""
    hf = CONFIGS[case.family] | SIZES.get(case.family, _ENCODER)
    heads = MODEL_HEADS.get(case.family, ("pooler", "mlm"))
    backbone = make_backbone(
        case.family, hf, heads, dtype=case.dtype, stack="scan", dropout=case.dropout
    )
    if case.work == "adapt":
        prompt, head = make_prompt("none", backbone.dims), TargetHead()
        return Model(backbone, prompt, {"main": head}), Objective("main", on_targets, sums=count_hits)
    fields = dict(length=case.length)
    if backbone.dims.decoder_layers and case.method == "prefix":
        fields |= dict(decoder=case.length, cross=case.length)
    prompt = make_prompt(case.method, backbone.dims, **fields)
    if case.work == "pretrain" or case.family == "t5" and case.work == "predict":
        words = lm.Head(np.arange(5, 9), np.arange(4).reshape(4, 1, 1), np.zeros((4, 1, 1), int), "full")
        loss = make_loss("full", 0.0)
        head = AnswerHead(words, words)
        whole = lambda scores, *given: loss(scores.whole, *given)
        told = lambda scores, *given: count_classes(scores.words, *given)
        return Model(backbone, prompt, {"main": head}), Objective("main", whole, sums=told)
    if case.work == "generate":
        return Model(backbone, prompt, {"main": lm.TextHead()}), Objective("main", free_text)
    return Model(backbone, prompt, {"main": linear.Head(3, "cls")}), Objective("main", cross_entropy)


def make_numbers(case: Case, model: Model, placement):
    """Describes what trains, what is frozen, and a batch, with where they lie."""
    shapes = unflatten({name: jax.ShapeDtypeStruct(x.shape, model.backbone.cfg.dtype)
              for name, x in backbone_shapes(model.backbone).items()})["backbone"]
    params = jax.eval_shape(lambda b: model.init(jax.random.key(0), b), shapes)
    trains = model.prompt.TRAINABLE if params["head"]["main"] else (r"prompt/.*",)
    patterns = (".*",) if case.work == "adapt" else trains
    trainable, frozen = split(params, trainable_mask(params, patterns))
    trainable = jax.eval_shape(lambda x: cast(x, jnp.float32), trainable)
    batch = make_batch(
        rows=8, length=case.tokens, slots=model.prompt.num_slots(), masks=4 if case.work == "adapt" else 1,
        shift=model.prompt.position_shift(), family=case.family, side=case.side,
        decoder_slots=model.prompt.num_decoder_slots(), decoder_shift=model.prompt.decoder_shift(),
    )
    batch = batch._replace(targets=np.zeros_like(batch.label_pos)) 
    return trainable, frozen, batch


def lower(case: Case) -> str:
    """Lowers a step for its target. -> StableHLO"""
    data, tensor, fsdp = case.mesh
    placement = make_placement(data, tensor, fsdp=fsdp, devices=jax.devices()[: data * tensor])
    placement = dataclasses.replace(placement, compiled_for=case.target)
    model, objective = make_model(case)
    trainable, frozen, batch = make_numbers(case, model, placement)
    put = lambda tree, where: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)
    frozen = put(frozen, placement.parameters(frozen))
    state = jax.eval_shape(lambda x: make_state(x, TX, jax.random.key(0)), trainable)
    spread = lambda tree, s: put(tree, jax.tree.map(lambda _: s, tree))
    state, laid = spread(state, placement.replicated), spread(batch, placement.batch)
    if case.work in ("train", "pretrain", "adapt"):
        step, given = make_train_step(model, TX, [objective]), (state, frozen, laid)
    elif case.work == "grid":
        many = lambda tree, s: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((RUNS, *x.shape), x.dtype, sharding=s), tree)
        placement = dataclasses.replace(placement, runs=True)
        apart = data > 1
        placement = Apart(**vars(placement)) if apart else placement
        from jaxprompt.sharding import DATA
        step = make_group_step(model, TX, [objective], axis=DATA if apart else None)
        where = placement.batch if apart else placement.replicated
        given = many(state, where), frozen, many(batch, where), Own({}, {})
    elif case.work == "generate":
        step = make_generate_step(model, max_new=4, eos=1, pad=0, beams=2)
        given = state.trainable, frozen, laid
    else:
        step, given = make_eval_step(model), (state.trainable, frozen, laid)
    with standing_in(case.target):
        traced = jax.jit(within(placement, step)).trace(*given)
        return traced.lower(lowering_platforms=(PLATFORMS[case.target.platform],)).as_text()


def products(text: str) -> Counter:
    """Counts products by (dtype and shape of both sides and the result)."""
    found = Counter()
    for line in text.splitlines():
        if "stablehlo.dot_general" in line:
            types = re.findall(r"tensor<([^>]*)>", line.rpartition(" : ")[2])
            found[tuple(types)] += 1
    return found
