"""The English tasks.

Templates and label words of the few-shot set are the manual ones of LM-BFF (Gao et al. 2021,
table 1); label numbers and columns are those of the hub version named. The numbers of subj are
those of LM-BFF's files: its hub version names its labels besides, and names decide. `_LM_BFF` are
the columns of these files, which have no header; trec's numbers there are others, see published.py.
Text formats of GLUE and SuperGLUE are those of T5 (Raffel et al. 2020, appendix D) without the data
set's name, which prompt tuning drops (Lester et al. 2021); the others are made alike. Questions of
inference for left-to-right models are worded as those of GPT-3 (Brown et al. 2020, appendix G).
"""

from jaxprompt.data.tasks.definitions.superglue import NLI, NO_TEST, SUPERGLUE
from jaxprompt.data.tasks.task import Definitions

_TRAIN_TEST = {"train": "train", "test": "test"}
_POLARITY = {
    "labels": ("negative", "positive"),
    "words": (("terrible",), ("great",)),
}
_THREE_WAY = {
    **NLI,
    "labels": ("entailment", "neutral", "contradiction"),
    "words": (("Yes",), ("Maybe",), ("No",)),
    "causal_words": (("True",), ("Neither",), ("False",)),
}
_PARAPHRASE = {
    "labels": ("not_equivalent", "equivalent"),
    "words": (("No",), ("Yes",)),
    "metric": "f1",
    "positive": "equivalent",  # GLUE's F1 is of paraphrases
}
_LM_BFF = {"columns": ("label", "text")}
_LETTERS = ("A", "B", "C", "D")
_SPANS = {
    "fields": ("question", "context"),
    "answers": "answers",
    "plain": "{question|whole} [sep] {context}",
    "metric": "f1",
    "splits": NO_TEST,
}
_CONLL = ("O", *(f"{x}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for x in "BI"))


def _reading(article: str, choices: tuple[str, ...], letters: int) -> dict:
    return {
        "fields": (article, "question"),
        "choices": choices,
        "labels": _LETTERS[:letters],
        "words": tuple((letter,) for letter in _LETTERS[:letters]),
        "template": f"{{{article}}} Question: {{question|whole}} {{choices}} Answer: [mask].",
        "causal": f"{{{article}}} Question: {{question|whole}} {{choices}} Answer: [mask]",
        "text": f"question: {{question|whole}} choices: {{choices}} article: {{{article}}}",
        "plain": f"{{{article}}} [sep] {{question|whole}} {{choice}}",
        "query": f"{{{article}}}; {{question|whole}}?",
    }


def _race(subset: str) -> dict:
    fields = {"label": "answer", "values": _LETTERS, "hub": "ehovy/race", "subset": subset}
    return _reading("article", ("options",), 4) | fields


def _review(field: str) -> dict:
    return {
        "fields": (field,),
        "template": f"{{{field}}} It was [mask].",
        "causal": f"{{{field}}} It was [mask]",
        "text": f"sentence: {{{field}}}",
        "plain": f"{{{field}}}",
        **_POLARITY,
    }


ENGLISH: Definitions = SUPERGLUE | {
    "sst2": _review("sentence") | {"hub": "stanfordnlp/sst2", "splits": NO_TEST},
    "sst5": _review("text")
    | _LM_BFF
    | {
        "hub": "SetFit/sst5",
        "labels": ("very negative", "negative", "neutral", "positive", "very positive"),
        "words": (("terrible",), ("bad",), ("okay",), ("good",), ("great",)),
    },
    "mr": _review("text") | _LM_BFF | {"hub": "cornell-movie-review-data/rotten_tomatoes"},
    "cr": _review("text") | _LM_BFF | {"hub": "SetFit/CR", "splits": _TRAIN_TEST},
    "mpqa": _review("text")
    | _LM_BFF
    | {
        "hub": "rahulsikder223/SentEval-MPQA",
        "renames": {"sentence": "text"},
        "splits": _TRAIN_TEST,
    },
    "imdb": _review("text") | {"hub": "stanfordnlp/imdb", "splits": _TRAIN_TEST},
    "subj": {
        "fields": ("text",),
        "labels": ("subjective", "objective"),  # as LM-BFF's files; the hub's rows carry names
        "hub": "SetFit/subj",
        "splits": _TRAIN_TEST,
        "template": "{text} This is [mask].",
        "causal": "{text} This is [mask]",
        "text": "sentence: {text}",
        "words": (("subjective",), ("objective",)),
        "plain": "{text}",
        **_LM_BFF,
    },
    "cola": {
        "fields": ("sentence",),
        "labels": ("unacceptable", "acceptable"),
        "hub": "nyu-mll/glue",
        "subset": "cola",
        "splits": NO_TEST,
        "template": "{sentence} This is [mask].",
        "causal": "{sentence} This is [mask]",
        "text": "sentence: {sentence}",
        "words": (("incorrect",), ("correct",)),
        "plain": "{sentence}",
        "metric": "matthews",
        "columns": ("source", "label", "mark", "sentence"),  # its train and dev name none
    },
    "trec": {
        "fields": ("text",),
        "label": "coarse_label",
        "labels": ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        "hub": "CogComp/trec",
        "revision": "refs/convert/parquet",
        "splits": _TRAIN_TEST,
        "template": "[mask]: {text}",
        "words": (
            ("Expression",),
            ("Entity",),
            ("Description",),
            ("Human",),
            ("Location",),
            ("Number",),
        ),
        "causal": "Question: {text} Answer type: [mask]",
        "text": "question: {text}",
        "targets": ("abbreviation", "entity", "description", "human", "location", "number"),
        "plain": "{text}",
        "columns": ("lm_bff_label", "text"),
    },
    "ag_news": {
        "fields": ("text",),
        "labels": ("World", "Sports", "Business", "Sci/Tech"),
        "hub": "fancyzhx/ag_news",
        "splits": _TRAIN_TEST,
        "template": "[mask] news: {text}",
        "words": (("World",), ("Sports",), ("Business",), ("Technology",)),
        "causal": "Article: {text} Category: [mask]",
        "text": "text: {text}",
        "plain": "{text}",
    },
    "yahoo_answers_topics": {
        "fields": ("question_title", "question_content", "best_answer"),
        "label": "topic",
        "labels": (
            "Society & Culture",
            "Science & Mathematics",
            "Health",
            "Education & Reference",
            "Computers & Internet",
            "Sports",
            "Business & Finance",
            "Entertainment & Music",
            "Family & Relationships",
            "Politics & Government",
        ),
        "hub": "community-datasets/yahoo_answers_topics",
        "splits": _TRAIN_TEST,
        "template": "[mask] question: {question_title} {question_content} {best_answer}",
        "words": (
            ("culture",),
            ("science",),
            ("health",),
            ("education",),
            ("computer",),
            ("sports",),
            ("business",),
            ("music",),
            ("family",),
            ("politics",),
        ),
        "causal": "{question_title} {question_content} {best_answer} This is about [mask]",
        "text": "title: {question_title} question: {question_content} answer: {best_answer}",
        "plain": "{question_title} {question_content} {best_answer}",
    },
    "dbpedia_14": {
        "fields": ("title", "content"),
        "labels": (
            "Company",
            "EducationalInstitution",
            "Artist",
            "Athlete",
            "OfficeHolder",
            "MeanOfTransportation",
            "Building",
            "NaturalPlace",
            "Village",
            "Animal",
            "Plant",
            "Album",
            "Film",
            "WrittenWork",
        ),
        "hub": "fancyzhx/dbpedia_14",
        "splits": _TRAIN_TEST,
        "template": "{title} {content} This is about [mask].",
        "words": (
            ("company",),
            ("school",),
            ("artist",),
            ("athlete",),
            ("politics",),
            ("transportation",),
            ("building",),
            ("nature",),
            ("village",),
            ("animal",),
            ("plant",),
            ("album",),
            ("film",),
            ("book",),
        ),
        "causal": "{title} {content} This is about [mask]",
        "text": "title: {title} content: {content}",
        "plain": "{title} {content}",
        "query": "{title} {content}?",
    },
    "mnli": _THREE_WAY
    | {
        "hub": "nyu-mll/glue",
        "subset": "mnli",
        "splits": {"train": "train", "test": "validation_matched"},
        "left_out": ("-",),  # of its own files, whose annotators did not agree
    },
    # Its annotators did not agree on the rows of -1.
    "snli": _THREE_WAY | {"hub": "stanfordnlp/snli", "left_out": ("-1", "-")},
    "qnli": {
        "fields": ("question", "sentence"),
        "labels": ("entailment", "not_entailment"),
        "hub": "nyu-mll/glue",
        "subset": "qnli",
        "splits": NO_TEST,
        "template": "{question|chop}? [mask], {sentence|lower}",
        "words": (("Yes",), ("No",)),
        "causal": "{sentence} Does this answer the question: {question} Answer: [mask]",
        "text": "question: {question} sentence: {sentence}",
        "plain": "{question} [sep] {sentence}",
    },
    "mrpc": _PARAPHRASE
    | {
        "fields": ("sentence1", "sentence2"),
        "hub": "nyu-mll/glue",
        "subset": "mrpc",
        "template": "{sentence1} [mask], {sentence2|lower}",
        "causal": "{sentence1} {sentence2} Do both sentences mean the same? Answer: [mask]",
        "text": "sentence1: {sentence1} sentence2: {sentence2}",
        "plain": "{sentence1} [sep] {sentence2}",
    },
    "qqp": _PARAPHRASE
    | {
        "fields": ("question1", "question2"),
        "labels": ("not_duplicate", "duplicate"),
        "positive": "duplicate",
        "hub": "nyu-mll/glue",
        "subset": "qqp",
        "splits": NO_TEST,
        "template": "{question1} [mask], {question2|lower}",
        "causal": "{question1} {question2} Do both questions mean the same? Answer: [mask]",
        "text": "question1: {question1} question2: {question2}",
        "plain": "{question1} [sep] {question2}",
    },
    "stsb": {
        "fields": ("sentence1", "sentence2"),
        "number": "label",
        "limits": (0.0, 5.0),
        "hub": "nyu-mll/glue",
        "subset": "stsb",
        "splits": NO_TEST,
        "plain": "{sentence1} [sep] {sentence2}",
        "metric": "pearson",
    },
    "wnli": {
        "fields": ("sentence1", "sentence2"),
        "labels": ("not_entailment", "entailment"),
        "hub": "nyu-mll/glue",
        "subset": "wnli",
        "splits": NO_TEST,
        "template": "{sentence1|chop}? [mask], {sentence2|lower}",
        "words": (("No",), ("Yes",)),
        "causal": "{sentence1} Question: {sentence2} True or False? Answer: [mask]",
        "causal_words": (("False",), ("True",)),
        "text": "sentence1: {sentence1} sentence2: {sentence2}",
        "plain": "{sentence1} [sep] {sentence2}",
    },
    "race": _race("all"),
    "race_middle": _race("middle"),
    "race_high": _race("high"),
    "dream": _reading("dialogue", ("choice",), 3)
    | {
        "lines": ("dialogue",),
        "label": "answer",
        "hub": "dataset-org/dream",
        "nested": "questions",  # in its own files alone, as the columns
        "columns": ("dialogue", "questions", "id"),
        "revision": "refs/convert/parquet",
    },
    "cosmos_qa": _reading("context", ("answer0", "answer1", "answer2", "answer3"), 4)
    | {"hub": "allenai/cosmos_qa", "revision": "refs/convert/parquet", "splits": NO_TEST},
    "conll2003": {
        "fields": ("tokens",),
        "tags": "ner_tags",
        "values": _CONLL,  # its hub version has their numbers
        "plain": "{tokens}",
        "metric": "entity_f1",
        "hub": "eriktks/conll2003",
    },
    "squad": _SPANS | {"hub": "rajpurkar/squad"},
    "quoref": _SPANS | {"hub": "allenai/quoref"},
    "squad_v2": _SPANS | {"hub": "rajpurkar/squad_v2"},
    "topics": {
        "fields": ("text",),
        "labels": ("business", "food", "music", "science", "sports", "travel"),
        "template": "{text} This is about [mask].",
        "causal": "{text} This is about [mask]",
        "text": "text: {text}",
        "words": (("business",), ("food",), ("music",), ("science",), ("sports",), ("travel",)),
        "plain": "{text}",
    },
}
