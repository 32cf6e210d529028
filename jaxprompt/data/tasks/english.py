"""The English tasks.

Templates and label words of the few-shot set are the manual ones of LM-BFF (Gao et al. 2021,
table 1); label numbers and columns are those of the hub version named.
"""

_NO_TEST = {"train": "train", "test": "validation"}  # the hub hides the labels of its test rows
_TRAIN_TEST = {"train": "train", "test": "test"}
_POLARITY = {
    "labels": ("negative", "positive"),
    "words": (("terrible",), ("great",)),
}
_NLI = {
    "fields": ("premise", "hypothesis"),
    "template": "{premise|chop}? [mask], {hypothesis|lower}",
    "plain": "{premise} [sep] {hypothesis}",
}
_THREE_WAY = {
    **_NLI,
    "labels": ("entailment", "neutral", "contradiction"),
    "words": (("Yes",), ("Maybe",), ("No",)),
}
_PARAPHRASE = {
    "labels": ("not_equivalent", "equivalent"),
    "words": (("No",), ("Yes",)),
    "metric": "f1",
}


def _review(field: str) -> dict:
    return {
        "fields": (field,),
        "template": f"{{{field}}} It was [mask].",
        "plain": f"{{{field}}}",
        **_POLARITY,
    }


ENGLISH = {
    "sst2": _review("sentence") | {"hub": "stanfordnlp/sst2", "splits": _NO_TEST},
    "sst5": _review("text")
    | {
        "hub": "SetFit/sst5",
        "labels": ("very negative", "negative", "neutral", "positive", "very positive"),
        "words": (("terrible",), ("bad",), ("okay",), ("good",), ("great",)),
    },
    "mr": _review("text") | {"hub": "cornell-movie-review-data/rotten_tomatoes"},
    "cr": _review("text") | {"hub": "SetFit/CR", "splits": _TRAIN_TEST},
    "mpqa": _review("text")
    | {
        "hub": "rahulsikder223/SentEval-MPQA",
        "renames": {"sentence": "text"},
        "splits": _TRAIN_TEST,
    },
    "imdb": _review("text") | {"hub": "stanfordnlp/imdb", "splits": _TRAIN_TEST},
    "subj": {
        "fields": ("text",),
        "labels": ("objective", "subjective"),
        "hub": "SetFit/subj",
        "splits": _TRAIN_TEST,
        "template": "{text} This is [mask].",
        "words": (("objective",), ("subjective",)),
        "plain": "{text}",
    },
    "cola": {
        "fields": ("sentence",),
        "labels": ("unacceptable", "acceptable"),
        "hub": "nyu-mll/glue",
        "subset": "cola",
        "splits": _NO_TEST,
        "template": "{sentence} This is [mask].",
        "words": (("incorrect",), ("correct",)),
        "plain": "{sentence}",
        "metric": "matthews",
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
        "plain": "{text}",
    },
    "ag_news": {
        "fields": ("text",),
        "labels": ("World", "Sports", "Business", "Sci/Tech"),
        "hub": "fancyzhx/ag_news",
        "splits": _TRAIN_TEST,
        "template": "[mask] news: {text}",
        "words": (("World",), ("Sports",), ("Business",), ("Technology",)),
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
        "plain": "{title} {content}",
    },
    "rte": _NLI
    | {
        "labels": ("entailment", "not_entailment"),
        "words": (("Yes",), ("No",)),
        "hub": "aps/super_glue",
        "subset": "rte",
        "splits": _NO_TEST,
    },
    "cb": _NLI
    | {
        "labels": ("entailment", "contradiction", "neutral"),
        "words": (("Yes",), ("No",), ("Maybe",)),
        "hub": "aps/super_glue",
        "subset": "cb",
        "splits": _NO_TEST,
        "metric": "macro_f1",
    },
    "mnli": _THREE_WAY
    | {
        "hub": "nyu-mll/glue",
        "subset": "mnli",
        "splits": {"train": "train", "test": "validation_matched"},
    },
    "snli": _THREE_WAY | {"hub": "stanfordnlp/snli"},
    "qnli": {
        "fields": ("question", "sentence"),
        "labels": ("entailment", "not_entailment"),
        "hub": "nyu-mll/glue",
        "subset": "qnli",
        "splits": _NO_TEST,
        "template": "{question|chop}? [mask], {sentence|lower}",
        "words": (("Yes",), ("No",)),
        "plain": "{question} [sep] {sentence}",
    },
    "mrpc": _PARAPHRASE
    | {
        "fields": ("sentence1", "sentence2"),
        "hub": "nyu-mll/glue",
        "subset": "mrpc",
        "template": "{sentence1} [mask], {sentence2|lower}",
        "plain": "{sentence1} [sep] {sentence2}",
    },
    "qqp": _PARAPHRASE
    | {
        "fields": ("question1", "question2"),
        "labels": ("not_duplicate", "duplicate"),
        "hub": "nyu-mll/glue",
        "subset": "qqp",
        "splits": _NO_TEST,
        "template": "{question1} [mask], {question2|lower}",
        "plain": "{question1} [sep] {question2}",
    },
    "boolq": {
        "fields": ("question", "passage"),
        "labels": ("false", "true"),
        "hub": "aps/super_glue",
        "subset": "boolq",
        "splits": _NO_TEST,
        "template": "{passage} Question: {question}? Answer: [mask].",
        "words": (("No",), ("Yes",)),
        "plain": "{question} [sep] {passage}",
    },
    "wic": {
        "fields": ("word", "sentence1", "sentence2"),
        "labels": ("false", "true"),
        "hub": "aps/super_glue",
        "subset": "wic",
        "splits": _NO_TEST,
        "template": "{sentence1} {sentence2} Does {word} have the same meaning in both sentences?"
        " [mask].",
        "words": (("No",), ("Yes",)),
        "plain": "{word}: {sentence1} [sep] {word}: {sentence2}",
    },
    "copa": {
        "fields": ("premise", "connective"),
        "labels": ("choice1", "choice2"),
        "choices": ("choice1", "choice2"),
        "derive": {"connective": ("question", {"cause": "because", "effect": "so"})},
        "hub": "aps/super_glue",
        "subset": "copa",
        "splits": _NO_TEST,
        "template": "{premise} {connective} {choices} The correct one is [mask].",
        "words": (("A",), ("B",)),
        "plain": "{premise} {connective} [sep] {choice}",
    },
    "topics": {
        "fields": ("text",),
        "labels": ("business", "food", "music", "science", "sports", "travel"),
        "template": "{text} This is about [mask].",
        "words": (("business",), ("food",), ("music",), ("science",), ("sports",), ("travel",)),
        "plain": "{text}",
    },
}
