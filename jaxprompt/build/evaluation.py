"""Evaluates splits with the scorer of a config."""

from collections.abc import Callable

import jax

from jaxprompt import tree
from jaxprompt.build.task import eval_batches
from jaxprompt.config.run import RunConfig
from jaxprompt.data.text.encoded import Predictions, Split
from jaxprompt.models.folding import fold_flat
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.evaluation import make_answer_fn
from jaxprompt.training.features.cache import FeatureCache


def make_metrics_fn(
    config: RunConfig,
    scorer: Scorer,
    placement: Placement,
    feature_cache: FeatureCache | None = None,
) -> Callable[[Split, tree.Flat, tree.Flat], dict[str, float]]:
    """Returns a function from (split, trainable, frozen) to metrics, compiled once per shape."""
    evaluate = make_evaluate_fn(config, scorer, placement, feature_cache)
    return lambda split, trainable, frozen: evaluate(split, trainable, frozen)[0]


def make_evaluate_fn(
    config: RunConfig,
    scorer: Scorer,
    placement: Placement,
    feature_cache: FeatureCache | None = None,
) -> Callable[[Split, tree.Flat, tree.Flat], tuple[dict[str, float], Predictions]]:
    """Returns a function from (split, trainable, frozen) to metrics and answers.

    A prompt that is computed from other parameters is computed once per pass, not per batch.
    """
    feature_cache = feature_cache or FeatureCache(scorer)
    answer_fns: dict[bool, Callable[..., Predictions]] = {}
    # A process of several cannot read a whole array.
    folds = scorer.model.prompt.folds() and jax.process_count() == 1
    generates = scorer.generates

    def evaluate(
        split: Split, trainable: tree.Flat, frozen: tree.Flat
    ) -> tuple[dict[str, float], Predictions]:
        is_cached = not generates and feature_cache.has(split)
        model = feature_cache.model if is_cached else scorer.model
        if folds:
            example = scorer.one_batch(split.rows[:1])
            model, trainable, frozen = fold_flat(model, trainable, frozen, example)
        if is_cached not in answer_fns:  # shapes are the same in every pass
            answer_fns[is_cached] = make_answer_fn(
                generates, placement, model, config.generate, scorer.tokenizer, scorer.layout
            )
        units = split.repeat(config.generate.n) if generates else split
        batches = feature_cache.batches(split) if is_cached else eval_batches(scorer, units)
        answers = answer_fns[is_cached](trainable, frozen, batches, len(units.rows))
        scorer.head.check_outputs(split.average(answers))
        return scorer.measure(split, answers), answers

    return evaluate
