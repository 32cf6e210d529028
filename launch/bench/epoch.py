"""Seconds of an epoch of SST-2 (batch 32) on MiniLM with a prefix, in parts, beside PEFT's.

PEFT always takes random order; ours also batches whose rows are sorted by length (--group).
"""

import argparse
import dataclasses
import os
import statistics
from pathlib import Path

from launch.bench.models import LENGTH, serve
from launch.bench.process import side, worker


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with sst2/, JSON lines")
    parser.add_argument("--parts", type=int, default=4, help="turns of an epoch")
    parser.add_argument("--steps", type=int, default=50, help="of a turn")
    parser.add_argument("--group", type=int, default=8, help="data.group of the second epoch")


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets ours and PEFT's take turns."""
    rows = []
    for group in dict.fromkeys((1, args.group)):
        sides = [side("epoch", "ours", data=args.data, group=group)]
        sides.append(side("epoch", "peft", data=args.data, group=1))
        with worker(sides[0], args.cores) as ours, worker(sides[1], args.cores) as theirs:
            for ask in (ours, theirs):
                ask(5)
            pairs = [(ours(args.steps), theirs(args.steps)) for _ in range(args.parts)]
        times = [[one["seconds"] for one in pair] for pair in pairs]
        total = [sum(each) for each in zip(*times, strict=True)]
        row = {"steps": args.parts * args.steps, "ours s": total[0], "PEFT s": total[1]}
        median = statistics.median(a / b for a, b in times)
        rows.append({"data.group": group, **row, "ratio": median, "times": times})
    return rows


def read_sst2(args: argparse.Namespace):
    """Encodes the SST-2 training rows for prefix tuning of MiniLM. -> config, ..., split"""
    from configs import base
    from configs.parts import backbones, methods, tasks
    from jaxprompt.build.backbone import open_backbone
    from jaxprompt.build.examples import read_examples
    from jaxprompt.build.placement import build_placement
    from jaxprompt.build.task import scorer_from_config
    from jaxprompt.config.load import to_run_config

    values = base.get_config()
    backbones.minilm(values)
    tasks.sst2(values)
    methods.prefix(values, length=LENGTH, dropout=0.0)
    values.data.source, values.data.group = str(Path(args.data) / "sst2"), args.group
    values.optim.clip = 0.0
    c = to_run_config(values)
    examples = read_examples(c)
    backbone = open_backbone(c.backbone)
    placement = build_placement(c)
    scorer = scorer_from_config(c, backbone, examples, placement)
    return c, backbone, placement, scorer, scorer.encode(examples.splits["train"])


def serve_ours(args: argparse.Namespace) -> None:
    """Serves parts of an epoch of our loop; all its shapes are compiled first."""
    import jax

    from jaxprompt import rng
    from jaxprompt.build.backbone import load_weights
    from jaxprompt.build.initial_params import init_params
    from jaxprompt.build.optimizer import build_optimizer, make_milestones
    from jaxprompt.build.task import build_objectives, train_batches
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.training import steps
    from jaxprompt.training.state import make_state

    c, backbone, placement, scorer, rows = read_sst2(args)
    backbone, loaded = load_weights(backbone, placement)
    scorer = scorer.with_backbone(backbone)
    trainable, frozen, _ = init_params(c, scorer, loaded, rows, placement)
    batches = train_batches(c, scorer, rows)
    per_epoch = batches.steps_per_epoch
    plan = make_milestones(c.train, per_epoch, c.data.batch)
    tx = build_optimizer(c, trainable, plan, per_epoch)
    make = steps.make_train_step(scorer.model, tx, build_objectives(c, scorer.model))
    train_step = jit(make, donate_argnums=0)
    state = make_state(trainable, tx, rng.key_for(c.seed, "dropout"))
    shapes = {batch.encoder.ids.shape: batch for _, batch in zip(range(per_epoch), batches)}  # noqa: B905
    for batch in shapes.values():
        state, _ = train_step(state, frozen, batch)
    batches = train_batches(c, scorer, rows)

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, _ = train_step(state, frozen, next(batches))
        jax.block_until_ready(state)

    serve(run)


def serve_peft(args: argparse.Namespace) -> None:
    """Serves the same rows in the same order through PEFT, padded to the longest of each batch."""
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification

    from jaxprompt.data.batches.batching import TrainBatches

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


SIDES = {"ours": serve_ours, "peft": serve_peft}
