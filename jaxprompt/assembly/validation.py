"""What a config would train on, found without training: its data is read, weights are not."""

import functools
from collections.abc import Iterator
from typing import Any

import jax

from jaxprompt import tree
from jaxprompt.assembly import from_config, shared_tuning, starting_text
from jaxprompt.assembly.answers import check_room
from jaxprompt.assembly.grid import is_grid, list_runs
from jaxprompt.assembly.initial_params import check_start, divide
from jaxprompt.data.encoded import Encoded
from jaxprompt.models.model import backbone_shapes


def validate(c: Any) -> Iterator[str]:
    """Checks a tuning config with its data and its backbone. Yields what a run would say of them.

    Raises InputError for what a run would refuse before it reads weights.
    """
    if shared_tuning.is_shared(c):
        for name, own in shared_tuning.task_configs(c).items():
            yield f"shared task {name}:"
            yield from validate(own)
        return
    if is_grid(c):
        runs = list_runs(c, "")
        yield f"{len(runs)} runs, the first of them:"
        c = runs[0].config
    from_config.check_config(c)
    placement = from_config.build_placement(c)
    backbone = from_config.open_fitting(c, placement)
    examples = from_config.read_examples(c)
    scorer = from_config.scorer_from_config(c, backbone, examples, placement)
    splits = from_config.encode_splits(scorer, examples)
    check_room(c, scorer, splits)
    scorer = scorer.with_vocabulary_of(splits["train"])
    leaves = backbone_shapes(backbone.module, backbone.block["quantize"])
    shapes = tree.unflatten(leaves)["backbone"]
    init = functools.partial(scorer.model.init, choices=scorer.layout.num_rows)
    params = jax.eval_shape(init, jax.random.key(0), shapes)
    counts = starting_text.count_tokens(c, splits["train"], lambda: None)
    check_start(c, scorer, params, counts)
    trainable, frozen = divide(c, scorer, params)
    batches = from_config.train_batches(c, scorer, splits["train"])
    # The plan needs the length of an epoch, not the batches.
    batches.close()
    plan = from_config.plan_of(c, batches.steps_per_epoch, len(splits["train"].rows))
    # For what it refuses: a warmup as long as the run, the rate of a part that does not train.
    from_config.build_optimizer(c, trainable, plan, batches.steps_per_epoch)
    longest = from_config.longest_batch(c, scorer, splits["train"]).encoder.ids.shape

    yield f"backbone {c.backbone.path} ({backbone.family})"
    heads = sorted(backbone.module.cfg.model_heads)
    yield f"  heads in the checkpoint: {', '.join(heads) or 'none'}"
    yield f"task {scorer.task.name}, template {scorer.template!r}"
    yield "  " + ", ".join(f"{name} {part.size}" for name, part in splits.items())
    for line in from_config.tell_examples(scorer, splits, examples.notes):
        yield f"  {line}"
    yield f"  the first example: {spell(scorer, splits['train'].rows[0][0])}"
    yield tree.overview(trainable, frozen)
    most = f"{longest[0]} x {longest[1]} tokens"
    yield f"{plan.total} steps of up to {most}, dev every {plan.evaluate} steps"


def spell(scorer: Any, encoded: Encoded) -> str:
    """Writes an encoded example as its tokens; a soft token is [soft]."""
    names = scorer.tokenizer.convert_ids_to_tokens(list(map(int, encoded.ids)))
    return " ".join(
        "[soft]" if slot >= 0 else name for name, slot in zip(names, encoded.slot, strict=True)
    )
