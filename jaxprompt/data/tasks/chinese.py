"""The Chinese tasks. CLUE hides the labels of its test sets; its validation sets stand in."""

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
}
_TOPICS = (
    *("故事", "文化", "娱乐", "体育", "财经", "房产", "汽车", "教育"),
    *("科技", "军事", "旅游", "国际", "股票", "农业", "游戏"),
)

CHINESE = {
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
    "tnews": {
        **_CLUE,
        "subset": "tnews",
        "fields": ("sentence",),
        "labels": (
            "story",
            "culture",
            "entertainment",
            "sports",
            "finance",
            "house",
            "car",
            "edu",
            "tech",
            "military",
            "travel",
            "world",
            "stock",
            "agriculture",
            "game",
        ),
        "values": (
            *("100", "101", "102", "103", "104", "106", "107", "108"),
            *("109", "110", "112", "113", "114", "115", "116"),
        ),
        "template": "[mask]新闻：{sentence}",
        "words": tuple((word,) for word in _TOPICS),
        "causal": "新闻：{sentence}类别：[mask]",
        "text": "新闻：{sentence}",
        "targets": _TOPICS,
        "plain": "{sentence}",
    },
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
}
