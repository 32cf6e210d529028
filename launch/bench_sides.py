"""The processes that launch/bench.py measures in: one side of one comparison each.

usage: python launch/bench_sides.py SIDE [flags]; the answer is JSON on stdout, a line a question.
"""

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LENGTH = 20  # of every prompt that is timed
SHAPES = {  # MiniLM is that of 6 layers; nothing is measured on the tiny one
    "tiny": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    "minilm": dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12),
    "base": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    "large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
}


def hf_config(shape: str, dropout: float = 0.1) -> dict:
    """Returns the transformers config of a BERT shape."""
    width = SHAPES[shape]["hidden_size"]
    own = dict(vocab_size=30522, intermediate_size=4 * width, max_position_embeddings=512)
    rates = dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return SHAPES[shape] | own | rates


def peak_gib() -> float:
    """Tells the largest resident memory of this process up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def serve(run, tell=dict) -> None:
    """Answers each count on stdin with the seconds that run(count) takes, and what `tell` gives."""
    for line in sys.stdin:
        started = time.perf_counter()
        run(int(line))
        seconds = time.perf_counter() - started
        facts = {"seconds": seconds, "rss_peak_gib": peak_gib(), **tell()}
        print(json.dumps(facts), flush=True)


# -- one step -------------------------------------------------------------------------------------


def make_model(shape: str, kind: str, length: int = LENGTH, *, dropout: float = 0.1, **how):
    """Makes a BERT of a shape with a prompt, and a linear head of two classes on its pooler.

    The dropout is that of hidden states, attention and head; a prefix has none, as PEFT's.
    """
    from jaxprompt.backbones import make_backbone
    from jaxprompt.heads.linear import Classifier as Head
    from jaxprompt.models.model import Model
    from jaxprompt.prompts import make_prompt

    backbone = make_backbone("bert", hf_config(shape, dropout), {"pooler"}, **how)
    prompt = make_prompt(kind, backbone.dims, length=length)
    return Model(backbone, prompt, {"main": Head(2, "checkpoint", dropout)})


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


def make_work(model, rows: int, *, abstract: bool = False, params=None):
    """Makes (step, (state, frozen, batch)); the arguments are shapes alone where `abstract`.

    `params` are the model's where they were drawn on the host; else the device draws them.
    """
    import jax
    import optax

    from jaxprompt import rng, tree
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.scoring import losses
    from jaxprompt.training import optim, state, steps

    batch = make_batch(model.prompt, rows)
    batch = batch._replace(weights=batch.weights.astype(np.float32))
    tx = optim.make_optimizer("adamw", optax.constant_schedule(1.0), {"prompt": 1e-3, "head": 1e-3})

    def begin(params):
        mask = tree.trainable_mask(params, model.prompt.TRAINABLE)
        trainable, frozen = tree.split(params, mask)
        return state.make_state(trainable, tx, rng.key_for(0, "dropout")), frozen

    def draw(key):
        loaded = model.backbone.init(key, batch, method="init_all")["params"]
        return begin(model.init(key, tree.cast(loaded, model.backbone.cfg.dtype)))

    key = jax.random.key(0)
    if params is not None:
        start, frozen = jax.device_put(begin(params))
    else:
        start, frozen = jax.eval_shape(draw, key) if abstract else jax.jit(draw)(key)
    step = steps.make_train_step(model, tx, [steps.Objective("main", losses.cross_entropy)])
    return jit(step, donate_argnums=0), (start, frozen, jax.device_put(batch))


def time_steps(step, wait, reps: int, burst: int = 1) -> list[float]:
    """Gives the seconds of a step in each of `reps` bursts, behind two bursts that are not timed.

    Compilation is in those two. `wait` returns when all that was asked for is computed.
    """
    seconds = []
    for _ in range(2 + reps):
        started = time.perf_counter()
        for _ in range(burst):
            step()
        wait()
        seconds.append((time.perf_counter() - started) / burst)
    return seconds[2:]


def time_ours(args: argparse.Namespace) -> None:
    """Times our step; prints one JSON object."""
    import jax

    model = make_model(args.shape, args.kind, stack=args.stack, dtype=args.dtype)
    step, (state, frozen, batch) = make_work(model, args.rows)
    now = (state, None)

    def run() -> None:
        nonlocal now
        now = step(now[0], frozen, batch)

    seconds = time_steps(run, lambda: jax.block_until_ready(now), args.reps)
    print(json.dumps({"wall_s": seconds, "rss_peak_gib": peak_gib()}))


# -- an epoch of SST-2 ----------------------------------------------------------------------------


def read_sst2(args: argparse.Namespace):
    """Encodes the SST-2 training rows for prefix tuning of MiniLM. -> config, ..., split"""
    from configs import base
    from configs.parts import backbones, methods, tasks
    from jaxprompt.assembly import from_config
    from jaxprompt.assembly.pipeline import open_backbone

    c = base.get_config()
    backbones.minilm(c)
    tasks.sst2(c)
    methods.prefix(c, length=LENGTH, dropout=0.0)
    c.data.source, c.data.group, c.optim.clip = str(Path(args.data) / "sst2"), args.group, 0.0
    examples = from_config.read_examples(c)
    backbone = open_backbone(c.backbone.to_dict())
    placement = from_config.build_placement(c)
    scorer = from_config.scorer_from_config(c, backbone, examples, placement)
    return c, backbone, placement, scorer, scorer.encode(examples.splits["train"])


def epoch_ours(args: argparse.Namespace) -> None:
    """Serves parts of an epoch of our loop; all its shapes are compiled first."""
    import jax

    from jaxprompt import rng
    from jaxprompt.assembly import from_config
    from jaxprompt.assembly.pipeline import load_weights
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.training import steps
    from jaxprompt.training.state import make_state

    c, backbone, placement, scorer, rows = read_sst2(args)
    backbone, loaded = load_weights(backbone, placement)
    scorer = scorer.with_backbone(backbone)
    trainable, frozen, _ = from_config.start(c, scorer, loaded, rows, placement)
    batches = from_config.train_batches(c, scorer, rows)
    per_epoch = batches.steps_per_epoch
    plan = from_config.make_plan(c.train, per_epoch, c.data.batch)
    tx = from_config.build_optimizer(c, trainable, plan, per_epoch)
    make = steps.make_train_step(scorer.model, tx, from_config.build_objectives(c))
    train_step = jit(make, donate_argnums=0)
    state = make_state(trainable, tx, rng.key_for(c.seed, "dropout"))
    seen = {batch.encoder.ids.shape: batch for _, batch in zip(range(per_epoch), batches)}  # noqa: B905
    for batch in seen.values():
        state, _ = train_step(state, frozen, batch)
    batches = from_config.train_batches(c, scorer, rows)

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, _ = train_step(state, frozen, next(batches))
        jax.block_until_ready(state)

    serve(run)


def epoch_peft(args: argparse.Namespace) -> None:
    """Serves the same rows in the same order through PEFT, padded to the longest of each batch."""
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification

    from jaxprompt.data.batching import TrainBatches

    c, backbone, _, scorer, rows = read_sst2(args)
    layout = dataclasses.replace(scorer.layout, batch=c.data.batch)
    plan = TrainBatches(rows.rows, rows.labels, layout, seed=c.seed, group=c.data.group)
    order = (batch.index[batch.index >= 0] for batch in plan)
    model = AutoModelForSequenceClassification.from_pretrained(backbone.folder, num_labels=2)
    setting = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=LENGTH)
    model = peft.get_peft_model(model, setting).train()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=c.optim.lr, weight_decay=0.0)
    texts = [torch.tensor(row.ids) for (row,) in rows.rows]
    pad = torch.nn.utils.rnn.pad_sequence

    def run(count: int) -> None:
        for _ in range(count):
            chosen = next(order)
            ids = pad([texts[i] for i in chosen], True, scorer.layout.pad_id)
            mask = pad([torch.ones_like(texts[i]) for i in chosen], True)
            labels = torch.tensor(rows.labels[chosen], dtype=torch.long)
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    serve(run)


SIDES = {"ours": time_ours, "epoch-ours": epoch_ours, "epoch-peft": epoch_peft}


def main() -> None:
    """Reads the flags and answers."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--data")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--kind", choices=("soft", "prefix"), default="prefix")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    SIDES[args.side](args)


if __name__ == "__main__":
    main()
