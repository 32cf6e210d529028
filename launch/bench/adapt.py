"""Tokens a second of pre-training all weights, beside a plain loop of torch transformers.

Ours is the train step of `jaxprompt adapt` with its config. The loop is loss = model(...).loss,
backward, clip, AdamW, step; in bfloat16 its weights stay float32, as ours do, and autocast narrows.
Both read the same full rows with the same tokens asked for, without dropout. Each has a process of
its own on --cores, and they take turns. --compiled has torch.compile the loop's model; --device gpu
does too, and takes the large shapes as well. Tokens are those of the (encoder's) input; TFLOP/s are
of the products that a model needs, of what is computed twice or for nobody none.
"""

import argparse
import json
import os
import statistics
import tempfile
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launch.bench.lm import CONFIGS
from launch.bench.models import hf_config, serve
from launch.bench.process import side, worker

MASK, CLS, SEP, PAD, EOS = 103, 101, 102, 0, 1  # of BERT's vocabulary, and of T5's
LOWEST = 1000  # id of a word; what is below are specials in both vocabularies
RATE = 1e-4
KINDS = 8  # of batches, which come again and again


class Case(NamedTuple):
    """A model and its rows."""

    objective: str
    hf: dict[str, Any]  # its config.json
    batch: int
    length: int


_BERT = dict(model_type="bert", hidden_act="gelu", type_vocab_size=2, layer_norm_eps=1e-12)
_LARGE = dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16)
_T5 = dict(model_type="t5", feed_forward_proj="relu")
CASES = {
    "mlm": Case("mlm", _BERT | hf_config("minilm"), 32, 128),
    "span": Case("span_corruption", _T5 | CONFIGS["t5-small"], 8, 128),
    "mlm-large": Case("mlm", _BERT | hf_config("large"), 64, 512),
    "span-large": Case("span_corruption", _T5 | CONFIGS["t5-small"] | _LARGE, 32, 512),
}


def take_case(args: argparse.Namespace) -> Case:
    """Picks the case, with the flags' size of its batches."""
    case = CASES[args.case]
    return case._replace(batch=args.batch or case.batch, length=args.length or case.length)


# -- rows -----------------------------------------------------------------------------------------


def make_batches(case: Case) -> list:
    """Draws batches of random text as the corpus gives them: full rows, another draw in each."""
    from jaxprompt.corpus.denoise import mlm, span_corruption
    from jaxprompt.corpus.denoise.samples import encode_sample, sample_rng
    from jaxprompt.data.batches.batching import collate

    vocab = case.hf["vocab_size"]
    if case.objective == "mlm":
        words = np.arange(LOWEST, vocab, dtype=np.int32)
        objective = mlm.Denoiser(case.length, MASK, (CLS,), (SEP,), words)
    else:
        marks = np.arange(vocab - 1, vocab - 101, -1, dtype=np.int32)
        objective = span_corruption.Denoiser(case.length, PAD, EOS, marks)
    draws, (room,) = np.random.RandomState(0), objective.capacity.length
    room -= len(objective.sep_ids) if case.objective == "mlm" else 0
    lengths, made = (*objective.lengths, 0), []
    for number in range(KINDS):
        texts = draws.randint(LOWEST, vocab - 100, (case.batch, room)).astype(np.int32)
        rows = [
            [encode_sample(objective([text], sample_rng(number, i)))]
            for i, text in enumerate(texts)
        ]
        made.append(
            collate(
                rows, np.zeros(case.batch, np.int32), range(case.batch), batch=case.batch,
                length=lengths[0], pad_id=PAD, label_width=objective.max_targets,
                decoder_length=lengths[1],
            )
        )  # fmt: skip
    assert all(batch.encoder.mask.all() for batch in made), "rows are not full"
    return made


# -- ours -----------------------------------------------------------------------------------------


def time_ours(args: argparse.Namespace) -> None:
    """Answers with the seconds of so many steps, and the last loss."""
    import importlib

    import jax

    from jaxprompt import rng
    from jaxprompt.build.backbone import backbone_from_config
    from jaxprompt.build.optimizer import build_optimizer, make_milestones
    from jaxprompt.build.placement import build_placement
    from jaxprompt.config.load import to_run_config
    from jaxprompt.parallel import sharding
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.parallel.devices import find_device
    from jaxprompt.runs import adapt
    from jaxprompt.training import steps
    from jaxprompt.training.state import place_state

    case = take_case(args)
    config_file = importlib.import_module(f"configs.adapt.{case.objective}")
    c = to_run_config(config_file.get_config()).replace({
        "data.batch": case.batch, "data.eval_batch": case.batch,
        "backbone.dtype": args.dtype, "backbone.stack": args.stack,
        "optim.name": "adamw", "optim.schedule": "constant", "optim.lr": RATE,
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        c = c.replace({"backbone.init": str(Path(folder) / "config.json")})
        Path(c.backbone.init).write_text(json.dumps(case.hf))
        head = adapt.NEEDS[case.objective][1]
        backbone = backbone_from_config(c.backbone, Path(folder), case.hf, (head,))
        backbone = backbone._replace(config=c.backbone.replace({"dtype": "float32"}))
        placement = build_placement(c)
        adapted = adapt.load_adaptable(c, backbone, placement)
    plan = make_milestones(c.train, KINDS, case.batch)
    tx = build_optimizer(c, adapted.trainable, plan, KINDS)
    step = steps.make_train_step(adapted.model, tx, adapted.objectives)
    state = place_state(placement, adapted.trainable, tx, rng.key_for(c.seed, "dropout"))
    step = jit(
        sharding.with_placement(placement, step), donate_argnums=0, has_dropout=False,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), placement.replicated),
    )  # fmt: skip
    batches, measured = cycle(make_batches(case)), None

    def run(count: int) -> None:
        nonlocal state, measured
        for _ in range(count):
            batch = sharding.put_batch(placement, next(batches))
            state, measured = step(state, adapted.frozen, batch)
        jax.block_until_ready((state, measured))

    batch, device = next(batches), find_device(jax.devices()[0].device_kind)
    flop = adapt.count_adapt_flops(adapted, batch, case.batch, placement)
    facts = {"flop": flop, "peak": device.peak(args.dtype) if device else 0.0}
    serve(run, lambda: facts | {"loss": float(measured["loss"])})


# -- torch ----------------------------------------------------------------------------------------


def torch_batch(case: Case, batch) -> dict:
    """Lays a batch out for transformers: labels at the positions asked for, -100 elsewhere."""
    import torch

    ids = batch.encoder.ids
    labels = batch.targets
    if case.objective == "mlm":
        labels = np.full_like(ids, -100)
        rows, columns = np.nonzero(batch.targets >= 0)
        labels[rows, batch.label_pos[rows, columns]] = batch.targets[rows, columns]
    given = dict(input_ids=ids, attention_mask=batch.encoder.mask, labels=labels)
    return {name: torch.from_numpy(x.astype(np.int64)) for name, x in given.items()}


def time_torch(args: argparse.Namespace) -> None:
    """Answers with the seconds of so many steps, and the last loss."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, JAX's default there
    case, device = take_case(args), "cuda" if args.device == "gpu" else "cpu"
    if case.objective == "mlm":
        still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = transformers.BertForMaskedLM(transformers.BertConfig(**case.hf | still))
    else:
        config = transformers.T5Config(**case.hf | dict(dropout_rate=0.0))
        model = transformers.T5ForConditionalGeneration(config)
    model = model.to(device).train()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        weights, lr=RATE, weight_decay=0.01, fused=True if device == "cuda" else None
    )
    forward = torch.compile(model) if args.compiled or device == "cuda" else model
    narrow = torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16")
    batches, loss = cycle([torch_batch(case, batch) for batch in make_batches(case)]), None

    def run(count: int) -> None:
        nonlocal loss
        for _ in range(count):
            batch = {name: x.to(device) for name, x in next(batches).items()}
            with narrow:
                loss = forward(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    serve(run, lambda: {"loss": loss.item()})


# -- both -----------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, case: str, dtype: str) -> dict:
    """Lets both sides train in turns. Returns medians, and those of each turn's ratios."""
    own = {name: getattr(args, name) for name in ("device", "stack", "batch", "length")}
    own |= {"case": case, "dtype": dtype}
    sides = [side("adapt", "ours", **own), side("adapt", "torch", **own, compiled=args.compiled)]
    with worker(sides[0], args.cores) as ours, worker(sides[1], args.cores) as theirs:
        for ask in (ours, theirs):
            ask(2)
        pairs = [(ours(args.steps), theirs(args.steps)) for _ in range(args.rounds)]
    own = take_case(argparse.Namespace(case=case, batch=args.batch, length=args.length))
    row = {"case": case, "dtype": dtype, "rows": f"{own.batch} x {own.length}"}
    times = [[one["seconds"] / args.steps for one in pair] for pair in pairs]
    row["time ratio"] = statistics.median(a / b for a, b in times)
    flop, peak = pairs[0][0]["flop"], pairs[0][0]["peak"]
    for name, told, seconds in zip(
        ("ours", "torch"), pairs[-1], zip(*times, strict=True), strict=True
    ):
        spent = statistics.median(seconds)
        row |= {f"{name} ms": 1e3 * spent, f"{name} tokens/s": own.batch * own.length / spent}
        row |= {f"{name} TFLOP/s": 1e-12 * flop / spent}
        row |= {f"{name} share of peak": flop / spent / peak} if peak else {}
        row |= {f"{name} peak GiB": told["rss_peak_gib"], f"{name} loss": told["loss"]}
    return row | {"times": times}


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--batch", type=int, default=0, help="rows; 0 = the case's")
    parser.add_argument("--length", type=int, default=0, help="tokens of a row; 0 = the case's")
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--compiled", action="store_true", help="torch.compile on the CPU too")
    parser.add_argument("--case", choices=CASES, help="of a side")
    parser.add_argument("--dtype", default="float32", help="of a side")


def measure(args: argparse.Namespace) -> list[dict]:
    """Compares each case in each type."""
    on_gpu = args.device == "gpu"
    cases = args.cases or (list(CASES) if on_gpu else ["mlm", "span"])
    dtypes = args.dtypes or (["bfloat16"] if on_gpu else ["float32", "bfloat16"])
    return [compare(args, case, dtype) for case in cases for dtype in dtypes]


SIDES = {"ours": time_ours, "torch": time_torch}
