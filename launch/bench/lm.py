"""Seconds and memory of a step on T5 and GPT-2 (first) beside PEFT's (second).

Input is 128 random tokens a row, the target 8; both sides take the loss over the whole target. Soft
tokens of a GPT-2 stand in front of all rows and run once a step, as in a run, but for --in-rows.
The cases `write` and `scores` have sides here too.
"""

import argparse
import dataclasses
import os
import statistics

import numpy as np

from launch.bench.models import LENGTH, serve
from launch.bench.process import side, worker

INPUT, TARGET = 128, 8
T5 = dict(vocab_size=32128, d_kv=64, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
CONFIGS = {
    "t5-small": T5 | dict(d_model=512, d_ff=2048, num_layers=6, num_heads=8),
    "t5-base": T5 | dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "gpt2": dict(vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024),
    # Nothing is measured on these two.
    "t5-tiny": T5 | dict(vocab_size=99, d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16),
    "gpt2-tiny": dict(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=256),
}
MEASURED = ("t5-small", "t5-base", "gpt2")
PAIRS = {
    "t5": (("soft", "soft"), ("deep", "soft"), ("decoder", "prefix")),
    "gpt2": (("soft", "soft"), ("prefix", "prefix")),
}  # method, PEFT's
KINDS = {  # of prompt, and where it stands; "deep" in all three attentions of a T5
    "none": ("none", ()),
    "soft": ("soft", ("length",)),
    "prefix": ("prefix", ("length",)),
    "deep": ("prefix", ("length", "decoder", "cross")),
    "decoder": ("prefix", ("decoder",)),
}


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case and its kin."""
    parser.add_argument("--model", choices=CONFIGS, help="one of the models alone")
    parser.add_argument("--kind", choices=KINDS, default="soft", help="of a side's prompt")
    parser.add_argument("--rows", type=int, default=16, help="of a batch")
    parser.add_argument("--length", type=int, default=LENGTH, help="of the prompt")
    parser.add_argument("--input", type=int, default=INPUT, help="tokens of a row in front of 8")
    parser.add_argument("--in-rows", action="store_true", help="soft tokens run in every row")
    parser.add_argument("--reps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scores", choices=("restricted", "full"), help="of a side's head")
    parser.add_argument("--still", action="store_true", help="no dropout")


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets ours and PEFT's take turns."""
    rows = []
    for model in [args.model] if args.model else MEASURED:
        for kind, peft_kind in PAIRS[model.partition("-")[0]]:
            names = ("rows", "length", "input", "dtype")
            shape = {"model": model, **{name: getattr(args, name) for name in names}}
            how = {"in-rows": True} if args.in_rows else {}
            ours = side("lm", "step", **shape, kind=kind, stack=args.stack, **how)
            theirs = side("lm", "peft", **shape, kind=peft_kind)
            pair = take_turns(args, ours, theirs, args.reps)
            rows.append({"model": model, "ours": kind, "PEFT": peft_kind, **pair})
    return rows


def take_turns(args: argparse.Namespace, left: list[str], right: list[str], count: int) -> dict:
    """Lets two sides answer `count` in turns. Returns medians and ratios."""
    with worker(left, args.cores) as one, worker(right, args.cores) as two:
        for ask in (one, two):
            ask(count), ask(count)
        pairs = [(one(count), two(count)) for _ in range(args.rounds)]
    row = {}
    for field, name in (("seconds", "s"), ("rss_peak_gib", "peak GiB")):
        values = [[each[field] for each in pair] for pair in pairs]
        for side_name, seconds in zip(("first", "second"), zip(*values, strict=True), strict=True):
            row[f"{side_name} {name}"] = statistics.median(seconds)
        row[f"ratio {name}"] = statistics.median(a / b for a, b in values)
    return row | {"seconds": [[each["seconds"] for each in pair] for pair in pairs]}


# -- ours -----------------------------------------------------------------------------------------


def make_model(args: argparse.Namespace):
    """Makes a model with a prompt and a head: free text, or scores of four label words."""
    from jaxprompt.backbones import make_backbone
    from jaxprompt.heads import verbalizer
    from jaxprompt.layers.reading import TargetScores
    from jaxprompt.models.model import Model
    from jaxprompt.prompts import make_prompt

    family = args.model.partition("-")[0]
    dropout = {"dropout": 0.0} if args.still else {}
    backbone = make_backbone(
        family, CONFIGS[args.model], {"lm"}, stack=args.stack, dtype=args.dtype, **dropout
    )
    name, places = KINDS[args.kind]
    fields = {"length": 0} if "decoder" in places else {}
    fields |= dict.fromkeys(places, args.length)
    if args.scores:
        rows, column = np.arange(100, 104), np.arange(4)[:, None, None]
        head = verbalizer.LabelWords(rows, column, np.zeros_like(column), args.scores)
    else:
        head = TargetScores()
    return Model(backbone, make_prompt(name, backbone.dims, **fields), {"main": head})


def make_batch(args: argparse.Namespace, prompt, *, generates: bool = False):
    """Draws a batch without padding; of a GPT-2 the target stands behind the input."""
    from jaxprompt.types import Batch, Tokens

    draws, slots = np.random.RandomState(0), prompt.num_slots()
    vocab = CONFIGS[args.model]["vocab_size"]
    draw = lambda count: draws.randint(5, vocab, (args.rows, count)).astype(np.int32)

    def tokens(ids, slots, shift):
        zeros = np.zeros_like(ids)
        columns = zeros + np.arange(ids.shape[1], dtype=np.int32)
        slot = np.where(columns < slots, columns, -1)
        roles, lengths = zeros.astype(np.int8), np.full(len(ids), ids.shape[1], np.int32)
        # The fused kernel needs lengths, as training gives them.
        return Tokens(ids, zeros == 0, slot, columns + shift, zeros, roles, lengths=lengths)

    ids, targets = draw(slots + args.input), draw(TARGET)
    decoder, last = None, ids.shape[1] - 1
    if args.model.startswith("t5"):
        start = np.zeros((args.rows, 1), np.int32)
        fed = start if generates else np.concatenate([start, targets[:, :-1]], 1)
        decoder, last = tokens(fed, 0, prompt.decoder_shift()), 0
    elif not generates:
        ids = np.concatenate([ids, targets[:, :-1]], 1)
    encoder = tokens(ids, slots, prompt.position_shift())
    index = np.arange(args.rows, dtype=np.int32)
    label_pos = np.full((args.rows, TARGET), last, np.int32) + np.arange(TARGET, dtype=np.int32)
    weights = np.ones(args.rows, np.float32)
    labels = draws.randint(0, 4, args.rows).astype(np.int32)
    if args.scores:
        return Batch(encoder, label_pos[:, :1], labels, weights, index, decoder)
    return Batch(encoder, label_pos, labels, weights, index, decoder, targets)


def share_front(model, batch):
    """Takes soft tokens that stand in front of all rows out of these. -> model, batch"""
    from jaxprompt.types import SharedPrefix

    # A token is left to each row, as in a run.
    count = model.prompt.num_slots() - 1
    if count < 1 or not getattr(model.backbone, "supports_shared_prefix", False):
        return model, batch
    none = (0,) * count
    front = SharedPrefix(none, tuple(range(count)), none, none)
    columns = {name: x for name, x in batch.encoder._asdict().items() if np.ndim(x) == 2}
    tokens = batch.encoder._replace(
        **{name: x[:, count:] for name, x in columns.items()},
        lengths=batch.encoder.lengths - count,
    )
    batch = batch._replace(encoder=tokens, label_pos=batch.label_pos - count)
    return dataclasses.replace(model, shared_prefix=front), batch


def draw_params(model, batch):
    """Draws a model's parameters on the host, as if they came from a file."""
    import jax

    from jaxprompt.convert.tensor_reader import aligned_zeros

    init = lambda key: model.backbone.init(key, batch, method="init_all")["params"]
    draws = np.random.default_rng(0)

    def draw(leaf):
        values = aligned_zeros(leaf.shape, np.float32)
        draws.standard_normal(dtype=np.float32, out=values)
        values *= 0.02
        return values.astype(model.backbone.cfg.dtype, copy=False)

    loaded = jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)))
    return model.init(jax.random.key(0), loaded)


def time_step(args: argparse.Namespace) -> None:
    """Answers with the seconds of so many train steps."""
    import jax
    import optax

    from jaxprompt import rng, tree
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.scoring import losses
    from jaxprompt.training import optim, state, steps
    from jaxprompt.types import Objective

    model = make_model(args)
    batch = make_batch(args, model.prompt)
    if not args.in_rows:
        model, batch = share_front(model, batch)
    tx = optim.make_optimizer("adamw", optax.constant_schedule(1.0), {"prompt": 1e-3})
    loss = losses.make_loss(args.scores, 0.0) if args.scores else losses.text_loss

    params = draw_params(model, batch)
    trainable, frozen = tree.split_trainable(params, tree.trainable_mask(params, [r"prompt/.*"]))
    now, frozen = state.make_state(trainable, tx, rng.key_for(0, "dropout")), jax.device_put(frozen)
    del params
    step = steps.make_train_step(model, tx, [Objective("main", loss)])
    step, batch = jit(step, donate_argnums=0), jax.device_put(batch)

    def run(count: int) -> None:
        nonlocal now
        for _ in range(count):
            now, measured = step(now, frozen, batch)
        jax.block_until_ready(measured)

    serve(run)


def make_head_work(args: argparse.Namespace):
    """Makes the head's part of a step: (function, arguments), the gradient with the loss."""
    import jax

    from jaxprompt.scoring import losses
    from jaxprompt.types import Injection

    args.still = True
    model = make_model(args)
    batch = make_batch(args, model.prompt)
    params, batch = jax.device_put((draw_params(model, batch), batch))
    hidden = jax.numpy.ones((*batch.read.ids.shape, model.backbone.dims.width))
    loss = losses.make_loss(args.scores, 0.0)

    def score(hidden, weights, batch):
        bound = model.backbone.bind({"params": weights})
        scores = model.heads["main"].apply(
            {}, hidden, batch, Injection(), bound, deterministic=True
        )
        return loss(scores, batch.labels, batch.weights)[0]

    return jax.jit(jax.value_and_grad(score)), (hidden, params["backbone"], batch)


def time_head(args: argparse.Namespace) -> None:
    """Answers with the seconds of so many head steps."""
    import jax

    score, arguments = make_head_work(args)

    def run(count: int) -> None:
        for _ in range(count):
            scores = score(*arguments)
        jax.block_until_ready(scores)

    serve(run)


def time_writing(args: argparse.Namespace) -> None:
    """Answers with the seconds of writing so many tokens a row, greedily."""
    import jax

    from jaxprompt.models.generation import generate

    args.still = True
    model = make_model(args)
    batch = make_batch(args, model.prompt, generates=True)
    params, batch = jax.device_put((draw_params(model, batch), batch))
    never = CONFIGS[args.model]["vocab_size"]  # no token ends a text: all rows write all tokens
    write = jax.jit(
        lambda p, b, count: generate(model, p, b, max_new_tokens=count, eos=never, pad=0).ids,
        static_argnums=2,
    )
    serve(lambda count: write(params, batch, count).block_until_ready())


# -- torch ----------------------------------------------------------------------------------------


def torch_model(args: argparse.Namespace):
    """Makes the same shape and dtype in torch, of random weights."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    if args.model.startswith("t5"):
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**CONFIGS[args.model])
        )
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIGS[args.model]))
    return model.to(getattr(torch, args.dtype))


def time_peft(args: argparse.Namespace) -> None:
    """Answers with the seconds of so many train steps of PEFT's."""
    import peft
    import torch

    is_t5 = args.model.startswith("t5")
    setting = {"soft": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[args.kind]
    task = "SEQ_2_SEQ_LM" if is_t5 else "CAUSAL_LM"
    model = peft.get_peft_model(
        torch_model(args), setting(task_type=task, num_virtual_tokens=args.length)
    ).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    vocab = CONFIGS[args.model]["vocab_size"]
    ids = torch.randint(5, vocab, (args.rows, args.input + TARGET * (not is_t5)))
    labels = torch.randint(5, vocab, (args.rows, TARGET))
    if not is_t5:
        labels = torch.cat([torch.full((args.rows, args.input), -100), ids[:, args.input :]], 1)
    fed = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)

    def run(count: int) -> None:
        for _ in range(count):
            model(**fed).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    serve(run)


def time_torch_writing(args: argparse.Namespace) -> None:
    """Answers with the seconds of writing so many tokens a row by transformers' generate."""
    import torch

    model = torch_model(args).eval()
    ids = torch.randint(5, CONFIGS[args.model]["vocab_size"], (args.rows, args.input))
    mask = torch.ones_like(ids)

    def run(count: int) -> None:
        with torch.no_grad():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip

    serve(run)


SIDES = {
    "step": time_step, "head": time_head, "write": time_writing, "peft": time_peft,
    "torch-write": time_torch_writing,
}  # fmt: skip
