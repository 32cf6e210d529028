"""Metrics of predicted classes and generated texts, by libraries behind one small interface.

Metrics of pre-training are computed from sums over its targets.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from jaxprompt.data.text.encoded import MetricData
from jaxprompt.errors import InputError, check_extra, nearest
from jaxprompt.scoring import questions, ratio, relations, roles
from jaxprompt.scoring.answer_words import (
    HAN,
    answer_words,
    cmrc_text,
    cmrc_words,
    common_run,
    shared_words,
)
from jaxprompt.types import ABSENT

METRICS = ("accuracy", "f1", "macro_f1", "matthews")
RANKINGS = ("hit_at_1", "hit_at_10", "mrr")  # by the rank of the right class
LIKELIHOODS = ("loss", "perplexity")  # of the target texts; lower is better
TEXT_METRICS = ("exact_match", "rouge_l", "bleu", *LIKELIHOODS)
TAG_METRICS = ("entity_f1", "role_f1", "accuracy")
SPAN_METRICS = ("f1", "exact_match", "cmrc_f1")
NUMBER_METRICS = ("pearson", "spearman")
_DESCRIPTIONS = {
    "classes": "has classes",
    "texts": "writes text",
    "tags": "tags words",
    "spans": "finds spans",
    "numbers": "predicts numbers",
}
METRICS_OF = {  # kind of task -> its metrics
    "classes": METRICS + RANKINGS + relations.METRICS + questions.METRICS,
    "texts": TEXT_METRICS,
    "tags": TAG_METRICS,
    "spans": SPAN_METRICS,
    "numbers": NUMBER_METRICS,
}
_PACKAGES = {  # kind of task -> the optional packages that compute its metrics
    "classes": dict.fromkeys(("f1", "macro_f1", "matthews"), "sklearn"),
    "texts": {"rouge_l": "rouge_score", "bleu": "sacrebleu"},
    "tags": dict.fromkeys(("entity_f1", "role_f1"), "seqeval"),
}

_WORD = re.compile(rf"[{HAN}]|[^\W_{HAN}]+")


def all_metrics() -> tuple[str, ...]:
    """Lists the metrics of all types of answers."""
    return tuple(dict.fromkeys(name for names in METRICS_OF.values() for name in names))


def check_metric(name: str, num_classes: int, kind: str = "classes") -> None:
    """Raises InputError for a metric that is unknown or does not fit the task.

    `kind` is the type of the answers, a key of `METRICS_OF`; `num_classes` is used for classes.
    """
    supported = METRICS_OF[kind]
    if name not in supported:
        others = [other for other, names in METRICS_OF.items() if name in names]
        if others:
            raise InputError(
                f"metric {name} compares {others[0]}, but the task {_DESCRIPTIONS[kind]}; use "
                f"{', '.join(supported)}"
            )
        raise InputError(f"unknown metric {name!r}; {nearest(name, supported)}")
    if name in ("f1", *questions.METRICS) and num_classes != 2 and kind == "classes":
        raise InputError(
            f"metric {name} needs 2 classes, but the task has {num_classes}; use macro_f1"
        )


def check_package(name: str, kind: str) -> None:
    """Raises InputError if the package that computes a metric of a kind of task is missing."""
    package = _PACKAGES.get(kind, {}).get(name)
    if package:
        check_extra("metrics", package, f"task.metric={name}")


def right_classes(gold: np.ndarray, pred: np.ndarray, metric_data: MetricData | None) -> np.ndarray:
    """Returns the right class of each example; if there are several, the predicted or the first."""
    if metric_data is None:
        return gold
    triples = zip(gold, pred, metric_data.correct, strict=True)
    return np.array([p if p in classes else first for first, p, classes in triples])


def score_predictions(
    name: str,
    gold: ArrayLike,
    pred: ArrayLike,
    metric_data: MetricData | None = None,
    scores: np.ndarray | None = None,
    counts: np.ndarray | None = None,
) -> dict[str, float]:
    """Returns the metric `name` first, and accuracy, as fractions. gold, pred: [examples]

    With `counts` of METRICS, gold and pred are pairs of classes instead, and how often each occurs.

    RANKINGS need `scores` [examples, C], and are all returned, without accuracy; see `score_ranks`.

    f1 is that of the positive class, `metric_data.positive`, or else of class 1. macro_f1 averages
    over the classes that occur in gold or pred, which is scikit-learn's default, so that a class
    that is predicted but never right counts as 0. matthews is the correlation over all classes.
    pred = -1 (no class) is wrong but not a class. If `metric_data` has several right classes of an
    example, a pred or a rank among them is right. Metrics of relations and questions need
    `metric_data`; see scoring/relations.py and scoring/questions.py.
    """
    gold, pred = np.asarray(gold), np.asarray(pred)
    if name in RANKINGS:
        assert scores is not None
        right = metric_data.correct if metric_data else gold[:, None].tolist()
        pairs = zip(right, scores, strict=True)
        best = np.array([max(classes, key=row.__getitem__) for classes, row in pairs])
        return _with_first(name, score_ranks(best, scores))
    if name in relations.METRICS:
        assert metric_data is not None
        return relations.score_relations(name, metric_data, gold, pred)
    if name in questions.METRICS:
        assert metric_data is not None
        return questions.score_questions(name, metric_data, gold, pred, scores)
    if counts is None:  # of several right classes, the pairs have one
        gold = right_classes(gold, pred, metric_data)
    measured = {"accuracy": float(np.average(gold == pred, weights=counts))}
    if name != "accuracy":
        check_package(name, "classes")
        positive = metric_data.positive if metric_data else 1
        measured = {name: float(_sklearn_score(name, gold, pred, positive, counts)), **measured}
    return measured


def score_ranks(gold: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Returns the shares of right classes at rank 1 and up to 10, and the mean reciprocal rank.

    gold [examples], scores [examples, C]. Of classes with equal scores the first ranks higher, like
    argmax. LAMA calls the shares P@1 and P@10 (Petroni et al. 2019).
    """
    gold_scores = np.take_along_axis(scores, gold[:, None], axis=1)  # [N, 1]
    ties = (scores == gold_scores) & (np.arange(scores.shape[1]) < gold[:, None])
    ranks = 1 + (~(scores <= gold_scores) | ties).sum(1)  # [N]; NaN ranks behind all
    shares = {f"hit_at_{n}": float(np.mean(ranks <= n)) for n in (1, 10)}
    return {**shares, "mrr": float(np.mean(1 / ranks))}


def score_texts(name: str, gold: Sequence[Sequence[str]], pred: Sequence[str]) -> dict[str, float]:
    """Returns the metric `name` first, and exact_match, as fractions. gold: references per example

    exact_match is the share of texts equal to one of their references; white space at both ends is
    stripped and nothing else is normalised. rouge_l is ROUGE-L's F-measure with the best reference,
    averaged over examples: without stemming, in lower case, over runs of letters and digits; each
    Chinese character is a word. bleu is sacreBLEU's corpus BLEU, with its tokenizer "zh" if any
    reference contains a Chinese character and "13a" otherwise.
    """
    gold = [[text.strip() for text in texts] for texts in gold]
    pred = [text.strip() for text in pred]
    scores = {"exact_match": float(np.mean([p in g for g, p in zip(gold, pred, strict=True)]))}
    if name != "exact_match":
        check_package(name, "texts")
        scores = {name: (_rouge_l if name == "rouge_l" else _bleu)(gold, pred), **scores}
    return scores


def score_samples(
    name: str, gold: Sequence[Sequence[str]], samples: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Returns the metrics of generated texts; of n samples of each example their mean.

    With n > 1 also maj@n, the share of examples whose most frequent text is right, the first one of
    several and not an empty one (Wang et al. 2023, self-consistency), and pass@n, of those with a
    right text among n (Chen et al. 2021). A text is right as for exact_match.

    Args:
      name: the metric, as in `score_texts`.
      gold: references of each example.
      samples: texts of each example, the same number for all.
    """
    count = len(samples[0])
    samples = [[text.strip() for text in texts] for texts in samples]
    by_sample = [score_texts(name, gold, texts) for texts in zip(*samples, strict=True)]
    scores = {metric: float(np.mean([x[metric] for x in by_sample])) for metric in by_sample[0]}
    if count == 1:
        return scores
    most_frequent = [
        Counter(filter(None, texts) if any(texts) else texts).most_common(1)[0][0]
        for texts in samples
    ]
    right = [{text.strip() for text in texts} for texts in gold]
    votes = np.mean([text in texts for text, texts in zip(most_frequent, right, strict=True)])
    hits = np.mean([bool(texts & {*row}) for row, texts in zip(samples, right, strict=True)])
    return scores | {f"maj@{count}": float(votes), f"pass@{count}": float(hits)}


def score_likelihoods(name: str, logp: np.ndarray) -> dict[str, float]:
    """Returns the metric `name` first, of loss and perplexity per token of the targets.

    logp: log-probabilities of tokens, [examples, M], ABSENT = none. The loss is in nats.
    """
    is_token = logp > 0.5 * ABSENT
    total = -float(np.sum(logp, where=is_token, dtype=np.float64))
    scores = score_targets({"loss": total, "n": int(is_token.sum()), "hits": 0})
    return _with_first(name, {"loss": scores["loss"], "perplexity": scores["perplexity"]})


def selection_score(scores: Mapping[str, float], metric: str = "") -> float:
    """Returns the score of a run by its metric, by default the first one; higher is better."""
    name = metric or next(iter(scores))
    return -scores[name] if name in LIKELIHOODS else scores[name]


def score_tags(
    name: str,
    gold: Sequence[Sequence[str]],
    pred: Sequence[Sequence[str]],
    *,
    has_predicates: bool = False,
) -> dict[str, float]:
    """Returns the metric `name`, its precision and recall, and the accuracy of tags, as fractions.

    gold, pred: the tags of each text, in IOB2 unless the metric is accuracy, which is alone. An
    entity is right if its words and its type are; micro-averages over all entities, by seqeval in
    its default mode, which is conlleval's: tags that begin with I- can start an entity too. role_f1
    is for the arguments of predicates; see `score_roles`. With roles, `has_predicates`, both F1s
    are returned, the one that is not the metric last.
    """
    if has_predicates and name != "accuracy":
        (other,) = {"entity_f1", "role_f1"} - {name}
        return score_tags(name, gold, pred) | {other: score_tags(other, gold, pred)[other]}
    if name == "role_f1":
        return roles.score_roles(gold, pred)
    if name == "accuracy":
        words = zip(chain.from_iterable(gold), chain.from_iterable(pred), strict=True)
        return {"accuracy": float(np.mean([right == predicted for right, predicted in words]))}
    check_package(name, "tags")
    from seqeval.metrics import sequence_labeling

    tags = [list(tags) for tags in gold], [list(tags) for tags in pred]
    precision, recall, f1, _ = sequence_labeling.precision_recall_fscore_support(
        *tags, average="micro", zero_division=0
    )
    scores = {"entity_f1": f1, "precision": precision, "recall": recall}
    scores["accuracy"] = sequence_labeling.accuracy_score(*tags)
    return {name: float(score) for name, score in scores.items()}


def score_spans(name: str, gold: Sequence[Sequence[str]], pred: Sequence[str]) -> dict[str, float]:
    """Returns the metric `name` first, and exact_match, as fractions. gold: answers per question

    As in the official script of SQuAD: the best of the right answers counts; lower case, without
    punctuation and articles; f1 is over the words that two answers share. "" means no answer, which
    shares no word with anything else. A Chinese character is a word. cmrc_f1 is that of CMRC 2018's
    script, over the longest common run of words, and so is the exact match returned with it, which
    removes other marks.
    """
    if name == "cmrc_f1":
        return _score_chinese(gold, pred)
    pairs = []
    for answers, text in zip(gold, pred, strict=True):
        # SQuAD 2.0's script drops answers that are empty after normalisation, unless all are.
        words = list(filter(None, map(answer_words, answers))) or [[]]
        pairs.append((words, answer_words(text)))
    scores = {
        "f1": float(np.mean([max(shared_words(g, p) for g in answers) for answers, p in pairs])),
        "exact_match": float(np.mean([p in answers for answers, p in pairs])),
    }
    return _with_first(name, scores)


def _with_first(name: str, scores: dict[str, float]) -> dict[str, float]:
    """Returns the scores with one of them first."""
    return {name: scores[name], **scores}


def _score_chinese(gold: Sequence[Sequence[str]], pred: Sequence[str]) -> dict[str, float]:
    f1, exact = [], []
    for right, predicted in zip(gold, pred, strict=True):
        words = cmrc_words(predicted)
        f1.append(max(common_run(cmrc_words(answer), words) for answer in right))
        exact.append(cmrc_text(predicted) in map(cmrc_text, right))
    return {"cmrc_f1": float(np.mean(f1)), "exact_match": float(np.mean(exact))}


def score_numbers(name: str, gold: np.ndarray, pred: np.ndarray) -> dict[str, float]:
    """Returns the metric `name` first, of pearson and spearman: correlations as in GLUE's STS-B.

    0 if either side is constant or has one example: the correlation is undefined.
    """
    gold_and_pred = np.asarray(gold, np.float64), np.asarray(pred, np.float64)
    scores = dict.fromkeys(NUMBER_METRICS, 0.0)
    if all(np.ptp(values) for values in gold_and_pred):
        from scipy import stats

        scores = {
            "pearson": float(stats.pearsonr(*gold_and_pred).statistic),
            "spearman": float(stats.spearmanr(*gold_and_pred).statistic),
        }
    return _with_first(name, scores)


def score_targets(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns loss in nats, accuracy and perplexity of a language model, from sums over targets.

    `sums`: loss, n and hits, each summed over batches. Without a target all are NaN.
    """
    n = float(sums["n"]) or math.nan
    loss = float(sums["loss"]) / n
    # The perplexity of a loss above 709 is infinite, which needs no warning.
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(loss))
    return {"loss": loss, "accuracy": float(sums["hits"]) / n, "perplexity": perplexity}


def score_classes(sums: Mapping[str, float], majority: float) -> dict[str, float]:
    """Returns loss and accuracy of classes, from sums over examples, and a constant's accuracy.

    `sums`: loss, n and hits, each summed over batches. Without an example the first are NaN.
    """
    n = float(sums["n"]) or math.nan
    loss, accuracy = (float(sums[name]) / n for name in ("loss", "hits"))
    return {"loss": loss, "accuracy": accuracy, "majority": majority}


def score_detection(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns loss and accuracy of replaced-token detection, and the F1 of replaced tokens.

    `sums`: loss, n, hits, replaced, called (replaced) and found (both), summed over batches.
    `majority` is the accuracy of predicting that every token is original, whose F1 is 0.
    """
    n = float(sums["n"]) or math.nan
    return {
        "loss": float(sums["loss"]) / n,
        "accuracy": float(sums["hits"]) / n,
        "majority": 1 - float(sums["replaced"]) / n,
        "f1": ratio(2 * sums["found"], sums["called"] + sums["replaced"]),
        "precision": ratio(sums["found"], sums["called"]),
        "recall": ratio(sums["found"], sums["replaced"]),
    }


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and population standard deviation (ddof 0, as LM-BFF reports)."""
    return float(np.mean(values)), float(np.std(values))


def _sklearn_score(
    name: str, gold: np.ndarray, pred: np.ndarray, positive: int, counts: np.ndarray | None
) -> float:
    from sklearn import metrics

    if name == "matthews":
        if gold.max() < 2:  # with two classes, no class counts as the wrong one
            pred = np.where(pred < 0, 1 - gold, pred)
        if len(np.union1d(gold, pred)) < 2:  # scikit-learn warns, and gives 0 as well
            return 0.0
        return metrics.matthews_corrcoef(gold, pred, sample_weight=counts)
    classes = [positive] if name == "f1" else np.setdiff1d(np.union1d(gold, pred), [-1])
    # The macro average over one class is its F1.
    return metrics.f1_score(
        gold, pred, labels=classes, average="macro", sample_weight=counts, zero_division=0
    )


class _RougeTokenizer:
    """A tokenizer for rouge-score, whose default one drops all letters but a-z."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


def _rouge_l(gold: Sequence[Sequence[str]], pred: Sequence[str]) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_RougeTokenizer())
    pairs = zip(gold, pred, strict=True)
    return float(np.mean([scorer.score_multi(g, p)["rougeL"].fmeasure for g, p in pairs]))


def _bleu(gold: Sequence[Sequence[str]], pred: Sequence[str]) -> float:
    from sacrebleu.metrics import BLEU

    chinese = any(re.search(f"[{HAN}]", text) for texts in gold for text in texts)
    # Streams of references; sacreBLEU ignores None, of examples that have fewer.
    width = max(map(len, gold))
    streams = [[texts[i] if i < len(texts) else None for texts in gold] for i in range(width)]
    bleu = BLEU(tokenize="zh" if chinese else "13a")
    # None is supported and documented, but missing in its types.
    return bleu.corpus_score(pred, streams).score / 100  # type: ignore[arg-type]
