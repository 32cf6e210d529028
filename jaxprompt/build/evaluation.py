"""Evaluates splits with the scorer of a config."""

from collections.abc import Callable

import jax

from jaxprompt import tree
from jaxprompt.build.task import eval_batches
from jaxprompt.config.run import RunConfig
from jaxprompt.data.text.encoded import Answers, Split
from jaxprompt.models.folding import fold_flat
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.evaluation import make_answering
from jaxprompt.training.features.cache import FeatureCache


def build_measure(
    config: RunConfig, scorer: Scorer, placement: Placement, kept: FeatureCache | None = None
) -> Callable[[Split, tree.Flat, tree.Flat], dict[str, float]]:
    """Returns a function from (split, trainable, frozen) to metrics, compiled once per shape."""
    judge = build_judge(config, scorer, placement, kept)
    return lambda *given: judge(*given)[0]


def build_judge(
    config: RunConfig, scorer: Scorer, placement: Placement, kept: FeatureCache | None = None
) -> Callable[[Split, tree.Flat, tree.Flat], tuple[dict[str, float], Answers]]:
    """Returns a function from (split, trainable, frozen) to metrics and answers.

    A prompt that is computed from other parameters is computed once per pass, not per batch.
    """
    kept = kept or FeatureCache(scorer)
    steps: dict[bool, Callable[..., Answers]] = {}
    # On several hosts an array is not a single process's to look at.
    folds = scorer.model.prompt.folds() and jax.process_count() == 1
    writes = scorer.head.WRITES

    def judge(
        split: Split, trainable: tree.Flat, frozen: tree.Flat
    ) -> tuple[dict[str, float], Answers]:
        goes_on = not writes and kept.holds(split)
        model = kept.model if goes_on else scorer.model
        if folds:
            example = scorer.one_batch(split.rows[:1])
            model, trainable, frozen = fold_flat(model, trainable, frozen, example)
        if goes_on not in steps:  # of equal shapes in every pass
            steps[goes_on] = make_answering(
                scorer.head, placement, model, config.generate, scorer.tokenizer, scorer.layout
            )
        batches = kept.read(split) if goes_on else eval_batches(scorer, split)
        found = steps[goes_on](trainable, frozen, batches, len(split.rows))
        scorer.head.check_outputs(split.average(found))
        return scorer.measure(split, found), found

    return judge
