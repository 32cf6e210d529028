"""The Chinese tasks. CLUE hides the labels of its test sets; its validation sets stand in."""

from jaxprompt.data.tasks.task import Definitions

_CLUE = {
    "hub": "clue/clue",
    "splits": {"train": "train", "test": "validation"},
}
_PAIR = {
    "fields": ("sentence1", "sentence2"),
    "template": "{sentence1}？[mask]，{sentence2}",
    "text": "句子一：{sentence1}句子二：{sentence2}",
    "plain": "{sentence1} [sep] {sentence2}",
}
_NLI = {
    **_CLUE,
    **_PAIR,
    "labels": ("neutral", "entailment", "contradiction"),
    "words": (("可能",), ("是的",), ("不是",)),
    "causal": "{sentence1}由此可知：{sentence2}对吗？回答：[mask]",
    "text": "前提：{sentence1}假设：{sentence2}",
    "targets": ("中立", "蕴含", "矛盾"),
    "left_out": ("-1", "-"),  # annotators did not agree on them
}
_NUMERALS = ("一", "二", "三", "四")
_SELECTION = {
    "labels": ("A", "B", "C", "D"),
    "label": "answer",
    "words": tuple((numeral,) for numeral in _NUMERALS),
    "spaced": False,
    "option": "{name}、{text}。",
    "targets": _NUMERALS,
}
# The answer is the text of a choice, of which there are 2 to 4.
_READING = {
    **_SELECTION,
    "fields": ("context", "question"),
    "lines": ("context",),
    "choices": ("choice",),
    "template": "{context}问：{question|whole}{choices}答案是[mask]。",
    "causal": "{context}问：{question|whole}{choices}答案是[mask]",
    "text": "问题：{question|whole}选项：{choices}文章：{context}",
    "plain": "{context} [sep] {question|whole}{choice}",
    "query": "{context}； {question|whole}？",
    "hub": "dataset-org/c3",
    "nested": "questions",
    "columns": ("context", "questions", "id"),  # of a row of its own files
    "renames": {"documents": "context"},
}
_SPANS = {
    "fields": ("question", "context"),
    "answers": "answers",
    "plain": "{question|whole} [sep] {context}",
}
_TOPICS = (
    *("故事", "文化", "娱乐", "体育", "财经", "房产", "汽车", "教育"),
    *("科技", "军事", "旅游", "国际", "股票", "农业", "游戏"),
)

_NEWS = (
    *("story", "culture", "entertainment", "sports", "finance", "house", "car", "edu"),
    *("tech", "military", "travel", "world", "stock", "agriculture", "game"),
)
_CODES = (
    *("100", "101", "102", "103", "104", "106", "107", "108"),
    *("109", "110", "112", "113", "114", "115", "116"),
)
_TNEWS = {
    **_CLUE,
    "subset": "tnews",
    "fields": ("sentence",),
    "labels": _NEWS,
    "values": _CODES,
    "template": "[mask]新闻：{sentence}",
    "words": tuple((word,) for word in _TOPICS),
    "causal": "新闻：{sentence}类别：[mask]",
    "text": "新闻：{sentence}",
    "targets": _TOPICS,
    "plain": "{sentence}",
}


def _without(name: str) -> dict:
    """TNEWS without a class, whose examples are left out; the others keep their numbers."""
    index = _NEWS.index(name)
    others = [i for i in range(len(_NEWS)) if i != index]
    return _TNEWS | {
        "labels": tuple(_NEWS[i] for i in others),
        "values": tuple(f"{i}|{_CODES[i]}" for i in others),
        "left_out": (str(index), _CODES[index], name),
        "words": tuple((_TOPICS[i],) for i in others),
        "targets": tuple(_TOPICS[i] for i in others),
    }


CHINESE: Definitions = {
    "chnsenticorp": {
        "fields": ("text",),
        "labels": ("negative", "positive"),
        "hub": "lansinuote/ChnSentiCorp",
        "template": "{text}总之很[mask]。",
        "words": (("差",), ("好",)),
        "causal": "{text}总之很[mask]",
        "text": "评论：{text}",
        "targets": ("负面", "正面"),
        "plain": "{text}",
    },
    "tnews": _TNEWS,
    # The 14 classes of PPT (Gu et al. 2022, table 3), which does not say which one it leaves out:
    # here the rarest, 257 of 53,360 examples of train.
    "tnews14": _without("stock"),
    "lcqmc": {
        **_PAIR,
        "labels": ("different", "same"),
        "hub": "C-MTEB/LCQMC",
        "renames": {"score": "label"},
        "words": (("不同",), ("相同",)),
        "causal": "{sentence1}和{sentence2}意思[mask]",
        "targets": ("不同", "相同"),
    },
    "ocnli": {**_NLI, "subset": "ocnli"},
    "cmnli": {**_NLI, "subset": "cmnli"},
    "afqmc": {
        **_CLUE,
        **_PAIR,
        "subset": "afqmc",
        "labels": ("different", "same"),
        "words": (("不同",), ("相同",)),
        "causal": "{sentence1}和{sentence2}意思[mask]",
        "targets": ("不同", "相同"),
    },
    # Rows of the three below come from data.source alone; columns and ratings of `amazon` are those
    # of github.com/SophonPlus/ChineseNlpCorpus (yf_amazon), which PPT names (appendix A).
    "amazon": {
        "fields": ("comment",),
        "label": "rating",
        "labels": ("1 star", "2 stars", "3 stars", "4 stars", "5 stars"),
        "values": ("1", "2", "3", "4", "5"),
        "template": "{comment}总之很[mask]。",
        "words": (("差",), ("不好",), ("一般",), ("好",), ("赞",)),
        "causal": "{comment}总之很[mask]",
        "text": "评论：{comment}",
        "targets": ("很差", "差", "一般", "好", "很好"),
        "plain": "{comment}",
    },
    "eprstmt": {
        "fields": ("sentence",),
        "labels": ("negative", "positive"),
        "values": ("Negative", "Positive"),
        "template": "{sentence}总之很[mask]。",
        "words": (("差",), ("好",)),
        "causal": "{sentence}总之很[mask]",
        "text": "评论：{sentence}",
        "targets": ("负面", "正面"),
        "plain": "{sentence}",
    },
    "ccpm": {
        **_SELECTION,
        "fields": ("translation",),
        "choices": ("choices",),
        "template": "{translation}对应的诗句是：{choices}答案是[mask]。",
        "causal": "{translation}对应的诗句是：{choices}答案是[mask]",
        "text": "译文：{translation}选项：{choices}",
        "plain": "{translation} [sep] {choice}",
    },
    "c3": {**_READING, "subset": "mixed,dialog"},  # C3-M and C3-D
    "c3_mixed": {**_READING, "subset": "mixed"},
    "c3_dialog": {**_READING, "subset": "dialog"},
    "cmrc2018": _SPANS | {"hub": "hfl/cmrc2018", "metric": "cmrc_f1"},
    "xquad_zh": _SPANS
    | {
        "hub": "google/xquad",
        "subset": "xquad.zh",
        "splits": {"test": "validation"},
        "metric": "f1",
    },
}
