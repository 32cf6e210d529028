"""Models, batches and steps of BERT shapes, as several cases measure them."""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxprompt.config.run import RunConfig

LENGTH = 20  # of every prompt that is timed
DROPOUT = 0.1
SHAPES = {  # MiniLM is that of 6 layers; nothing is measured on the tiny one
    "tiny": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    "minilm": dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12),
    "base": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    "large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
}


def hf_config(shape: str) -> dict:
    """Returns the transformers config of a BERT shape."""
    width = SHAPES[shape]["hidden_size"]
    sizes = dict(vocab_size=30522, intermediate_size=4 * width, max_position_embeddings=512)
    rates = dict(hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT)
    return SHAPES[shape] | sizes | rates


def peak_gib() -> float:
    """Returns the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def serve(run, facts_of=dict) -> None:
    """Answers each count on stdin with the seconds of run(count) and the result of `facts_of`."""
    for line in sys.stdin:
        started = time.perf_counter()
        run(int(line))
        seconds = time.perf_counter() - started
        facts = {"seconds": seconds, "rss_peak_gib": peak_gib(), **facts_of()}
        print(json.dumps(facts), flush=True)


def make_model(shape: str, kind: str, length: int = LENGTH, **how):
    """Makes a BERT of a shape with a prompt, and a linear head of two classes on its pooler.

    The dropout is that of hidden states, attention and head; a prefix has none, as PEFT's.
    """
    from jaxprompt.backbones import make_backbone
    from jaxprompt.heads.linear import Classifier as Head
    from jaxprompt.models.model import Model
    from jaxprompt.prompts import make_prompt

    backbone = make_backbone("bert", hf_config(shape), {"pooler"}, **how)
    prompt = make_prompt(kind, backbone.dims, length=length)
    return Model(backbone, prompt, {"main": Head(2, "checkpoint", DROPOUT)})


def import_peft():
    """Imports PEFT. Version 0.21 misses the cache in signatures of transformers 5.24, by its name.

    The models still take the old name.
    """
    import inspect

    import peft
    from transformers import BertModel

    def signature(function):
        parameters = dict(inspect.signature(function).parameters)
        if "cache" in parameters:
            parameters["past_key_values"] = parameters["cache"]
        return SimpleNamespace(parameters=parameters)

    if "cache" in inspect.signature(BertModel.forward).parameters:
        peft.peft_model.inspect = SimpleNamespace(**vars(inspect) | {"signature": signature})
    return peft


def make_peft(shape: str, kind: str, *, dtype: str = "float32"):
    """Makes the model of `make_model` with the same prompt in PEFT, to be trained."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    peft = import_peft()
    torch.manual_seed(0)
    # Left to itself the model finds the problem's type in the first step, and compiles again.
    fields = {"num_labels": 2, "problem_type": "single_label_classification"}
    config = BertConfig(attn_implementation="sdpa", **hf_config(shape), **fields)
    model = BertForSequenceClassification(config).to(getattr(torch, dtype))
    settings = {"soft": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    setting = settings[kind](task_type="SEQ_CLS", num_virtual_tokens=LENGTH)
    return peft.get_peft_model(model, setting).train()


def make_batch(prompt, rows: int):
    """Draws a batch of rows x 128 tokens beside the prompt, without padding."""
    from jaxprompt.types import Batch, Tokens

    draws, slots = np.random.RandomState(0), prompt.num_slots()
    ids = draws.randint(5, 30522, (rows, slots + 128)).astype(np.int32)
    zeros = np.zeros_like(ids)
    columns = zeros + np.arange(ids.shape[1], dtype=np.int32)
    slot = np.where(columns < slots, columns, -1)
    positions = columns + prompt.position_shift()
    lengths = np.full(rows, ids.shape[1], np.int32)  # as training has it, for kernels
    roles = zeros.astype(np.int8)
    tokens = Tokens(ids, zeros == 0, slot, positions, zeros, roles, lengths=lengths)
    labels, index = draws.randint(0, 2, rows).astype(np.int32), np.arange(rows, dtype=np.int32)
    return Batch(tokens, np.full((rows, 1), slots, np.int32), labels, index >= 0, index)


def make_work(model, rows: int, *, abstract: bool = False):
    """Makes (step, (state, frozen, batch)); the arguments are shapes alone where `abstract`."""
    import jax
    import optax

    from jaxprompt import rng, tree
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.scoring import losses
    from jaxprompt.training import optim, state, steps
    from jaxprompt.types import Objective

    batch = make_batch(model.prompt, rows)
    batch = batch._replace(weights=batch.weights.astype(np.float32))
    tx = optim.make_optimizer("adamw", optax.constant_schedule(1.0), {"prompt": 1e-3, "head": 1e-3})

    def begin(params):
        mask = tree.trainable_mask(params, model.prompt.TRAINABLE)
        trainable, frozen = tree.split_trainable(params, mask)
        return state.make_state(trainable, tx, rng.key_for(0, "dropout")), frozen

    def draw(key):
        loaded = model.backbone.init(key, batch, method="init_all")["params"]
        return begin(model.init(key, tree.cast(loaded, model.backbone.cfg.dtype)))

    key = jax.random.key(0)
    start, frozen = jax.eval_shape(draw, key) if abstract else jax.jit(draw)(key)
    step = steps.make_train_step(model, tx, [Objective("main", losses.cross_entropy)])
    return jit(step, donate_argnums=0), (start, frozen, jax.device_put(batch))


def time_steps(step, wait, reps: int) -> list[float]:
    """Returns the seconds of `reps` steps, after two that are not timed: they compile.

    `wait` returns when a step is computed.
    """
    seconds = []
    for _ in range(2 + reps):
        started = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - started)
    return seconds[2:]


def minilm_on_sst2(data: str):
    """Makes a ConfigDict of MiniLM on `data`/sst2, every batch of the greatest length."""
    from configs import base
    from configs.parts import backbones, tasks

    c = base.get_config()
    backbones.minilm(c)
    tasks.sst2(c)
    c.data.source, c.data.multiple = str(Path(data) / "sst2"), c.data.max_len
    return c


def open_training(c: RunConfig, rows: int | None):
    """Reads all that a run of a config trains with, of at most `rows` training examples.

    -> scorer, splits, weights, training batches, optimizer, placement
    """
    from jaxprompt.build import initial_params
    from jaxprompt.build.backbone import load_weights
    from jaxprompt.build.examples import read_examples
    from jaxprompt.build.optimizer import build_optimizer, make_milestones
    from jaxprompt.build.placement import build_placement
    from jaxprompt.build.task import (
        encode_splits,
        open_checked_backbone,
        scorer_from_config,
        train_batches,
    )

    placement = build_placement(c)
    backbone = open_checked_backbone(c, placement)
    examples = read_examples(c)
    for name, part in examples.splits.items():
        examples.splits[name] = part[: rows if name == "train" else 64]
    scorer = scorer_from_config(c, backbone, examples, placement)
    splits = encode_splits(scorer, examples)
    backbone, loaded = load_weights(backbone, placement)
    scorer = scorer.with_backbone(backbone).with_vocabulary_of(splits["train"])
    weights = initial_params.init_params(c, scorer, loaded, splits["train"], placement)
    batches = train_batches(c, scorer, splits["train"])
    per_epoch = batches.steps_per_epoch
    plan = make_milestones(c.train, per_epoch, c.data.batch)
    tx = build_optimizer(c, weights.trainable, plan, per_epoch)
    return scorer, splits, weights, batches, tx, placement


def serve_steps(c: RunConfig, rows: int | None, facts_of: Callable[[Any, Any], dict]) -> None:
    """Answers each count of steps on stdin with the seconds, the peak and the facts.

    `facts_of` is called once, with the weights and the state.
    """
    import jax

    from jaxprompt import rng
    from jaxprompt.build.task import (
        build_objectives,
    )
    from jaxprompt.parallel import sharding
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.training import steps
    from jaxprompt.training.state import place_state

    scorer, _, weights, batches, tx, placement = open_training(c, rows)
    step = steps.make_train_step(scorer.model, tx, build_objectives(c, scorer.model))
    step = jit(sharding.with_placement(placement, step), donate_argnums=0)
    state = place_state(placement, weights.trainable, tx, rng.key_for(c.seed, "dropout"))
    facts = facts_of(weights, state)
    for line in sys.stdin:
        started = time.perf_counter()
        for _ in range(int(line)):
            batch = sharding.put_batch(placement, next(batches))
            state, _ = step(state, weights.frozen, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        print(json.dumps(facts | {"seconds": seconds, "rss_peak_gib": peak_gib()}), flush=True)
