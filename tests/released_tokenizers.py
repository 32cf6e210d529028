"""Tokenizers in the forms in which their families were released, trained on a few lines."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as before
from tokenizers import processors as after

TEXT = (
    "The cat sat on the mat, and didn't move: 2024 was naïve. HELLO the THE Café!\n\n"
    "In 1999 it cost 12,500 euros.\n\tx = f(a_1) # 東京 は 晴れ 你好，天气！ 🙂 "
    "the end of the story "
)
WORDS = [
    "the", "The", "cat", "didn't", "I'LL", "naïve", "Café", "ÉTÉ", "a\u0301", "HELLO", "x", "=",
    "f(a_1)", "#", "東京", "你好，天气！", "🙂", "🇫🇷", "ﬁne", "①", "2024", "1999:", "12,500", "7",
    "3.14", "code>", "``quoted''", "end.", "ugh",
]  # fmt: skip
GAPS = [" ", " ", " ", "  ", "   ", "\n", "\n\n", ":\n\n", "\t", " \n ", ""]

GPT2_SPLIT = before.ByteLevel(add_prefix_space=False)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
SQUEEZE = normalizers.Replace(Regex(" {2,}"), "▁")  # as SentencePiece's newer converters write it

# name: (model_type, model, normalizers, pre-tokenizers, specials in front, config)
Form = tuple[str, str, list[Any], list[Any], list[str], dict[str, Any]]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
T5 = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in reversed(range(100)))]
LLAMA = ["<unk>", "<s>", "</s>"]
ALBERT = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
DEBERTA = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
GLM = ["<|endoftext|>", "[CLS]", "[MASK]", "[gMASK]", "<|startofpiece|>", "<|endofpiece|>"]
END = ["<|endoftext|>"]


def _bert(lowercase: bool) -> list[Any]:
    return [normalizers.BertNormalizer(lowercase=lowercase, strip_accents=None)]


def _split(pattern: str) -> list[Any]:
    bytes_of = before.ByteLevel(add_prefix_space=False, use_regex=False)
    return [before.Split(Regex(pattern), "isolated"), bytes_of]


_WORDS = [before.WhitespaceSplit(), before.Metaspace(prepend_scheme="always")]
_QUOTES = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
_PLAIN = [normalizers.NFKD(), normalizers.StripAccents()]
_SPACES = [normalizers.Replace(" ", "▁")]
_BERT = [before.BertPreTokenizer()]
_META = before.Metaspace(prepend_scheme="always")
FORMS: dict[str, Form] = {
    "bert": ("bert", "WordPiece", _bert(True), _BERT, BERT, {}),
    "bert cased": ("bert", "WordPiece", _bert(False), _BERT, BERT, {}),
    "electra": ("electra", "WordPiece", _bert(True), _BERT, BERT, {}),
    "roberta": ("roberta", "bytes", [], [GPT2_SPLIT], ROBERTA, {}),
    "roberta lower case": (
        "roberta", "bytes", [normalizers.Lowercase()], [GPT2_SPLIT], ROBERTA, {}
    ),
    "roberta of words": ("roberta", "bytes", [], [before.ByteLevel()], ROBERTA, {}),
    "gpt2": ("gpt2", "bytes", [], [GPT2_SPLIT], END, {}),
    "dolma": (
        "gpt2", "bytes, whole words", [], _split(CL100K), END,
        {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"0": {"content": END[0]}}},
    ),
    "dolma in llama": (
        "llama", "bytes", [], _split(CL100K), END, {"tokenizer_class": "GPT2Tokenizer"}
    ),
    "llama 3": (
        "llama", "bytes, whole words", [], _split(CL100K), ["<|begin|>", "<|end|>"],
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>"},
    ),
    "smollm": (
        "llama", "bytes", [], [before.Digits(True), GPT2_SPLIT], END,
        {"tokenizer_class": "GPT2Tokenizer"},
    ),
    "qwen2": ("qwen2", "bytes", [normalizers.NFC()], _split(QWEN2), END, {}),
    "qwen2 with whole numbers": ("qwen2", "bytes", [], _split(CL100K), END, {}),
    "modernbert": ("modernbert", "bytes", [normalizers.NFC()], [GPT2_SPLIT], BERT, {}),
    "deberta": ("deberta", "bytes", [], [GPT2_SPLIT], BERT, {}),
    "glm": ("glm", "bytes", [], [GPT2_SPLIT], GLM, {}),
    "mistral nemo": (
        "mistral", "bytes", [], _split(QWEN2), LLAMA, {"tokenizer_class": "PreTrainedTokenizerFast"}
    ),
    "llama 2": (
        "llama", "pieces", [normalizers.Prepend("▁"), *_SPACES], [], LLAMA,
        {"tokenizer_class": "LlamaTokenizer"},
    ),
    "llama 2 later": (
        "llama", "pieces", [], [before.Metaspace(prepend_scheme="first", split=False)], LLAMA,
        {"tokenizer_class": "LlamaTokenizer"},
    ),
    "mistral": (
        "mistral", "pieces", [normalizers.Prepend("▁"), *_SPACES], [], LLAMA,
        {"tokenizer_class": "LlamaTokenizer"},
    ),
    "gemma": (
        "gemma", "pieces", _SPACES, [before.Split(" ", "merged_with_previous")], GEMMA, {}
    ),
    "t5": ("t5", "unigram", [], _WORDS, T5, {}),
    "t5 lower case": ("t5", "unigram", [normalizers.Lowercase()], _WORDS, T5, {}),
    "t5 later": ("t5", "unigram", [normalizers.Strip(False, True), SQUEEZE], [_META], T5, {}),
    "mt5": ("mt5", "unigram", [normalizers.NFKC()], _WORDS, T5, {}),
    "xlm-r": ("xlm-roberta", "unigram", [normalizers.NFKC()], _WORDS, ROBERTA, {}),
    "xlm-r that replaces": (
        "xlm-roberta", "unigram", [normalizers.Replace("ï", "i")], _WORDS, ROBERTA, {}
    ),
    "albert": (
        "albert", "unigram", [*_QUOTES, *_PLAIN, normalizers.Lowercase()], _WORDS, ALBERT, {}
    ),
    "albert cased": ("albert", "unigram", _QUOTES, _WORDS, ALBERT, {}),
    "deberta v3": (
        "deberta-v2", "unigram",
        [normalizers.Strip(), normalizers.NFC(), normalizers.Replace(Regex(" {2,}"), " ")],
        [_META], DEBERTA, {},
    ),
}  # fmt: skip


def write_form(folder: Path, name: str) -> Tokenizer:
    """Writes a form of FORMS into a folder. -> it, as the tokenizers library reads the file"""
    model_type, model, normalizing, splitting, specials, config = FORMS[name]
    tokenizer = _trained(model, normalizing, splitting, specials)
    tokenizer.add_special_tokens([
        AddedToken(token, lstrip=token == "<mask>", normalized=False) for token in specials
    ])  # fmt: skip
    tokenizer.add_tokens([AddedToken("<code>", normalized=False), AddedToken("ugh", rstrip=True)])
    first, last = _ends(specials)
    inner, kind = last * 2 if specials == ROBERTA else last, int("[SEP]" in last)
    if first or last:
        tokenizer.post_processor = after.TemplateProcessing(
            single=" ".join([*first, "$A", *last]),
            pair=" ".join([*first, "$A", *inner, f"$B:{kind}", *(f"{x}:{kind}" for x in last)]),
            special_tokens=[(x, tokenizer.token_to_id(x)) for x in {*first, *last}],
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _trained(kind: str, normalizing: list[Any], splitting: list[Any], specials: list[str]) -> Any:
    """Trains the model of a form behind the form's steps."""
    common = dict(vocab_size=420, special_tokens=specials, show_progress=False)
    if kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.decoder, trainer = decoders.WordPiece(), trainers.WordPieceTrainer(**common)
    elif kind.startswith("bytes"):
        tokenizer = Tokenizer(models.BPE(ignore_merges="whole" in kind))
        alphabet = before.ByteLevel.alphabet()
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    elif kind == "pieces":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        common["special_tokens"] = [*specials, *(f"<0x{i:02X}>" for i in range(256))]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder, trainer = decoders.Sequence(steps), trainers.BpeTrainer(**common)
    else:
        tokenizer = Tokenizer(models.Unigram())
        unknown = next(token for token in specials if "unk" in token.lower())
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=unknown, **common)
    whole = splitting[0] if len(splitting) == 1 else before.Sequence(splitting)
    if normalizing:
        tokenizer.normalizer = (
            normalizing[0] if len(normalizing) == 1 else normalizers.Sequence(normalizing)
        )
    if splitting:
        tokenizer.pre_tokenizer = whole
    if kind == "pieces":  # whole texts would be learned
        tokenizer.pre_tokenizer = before.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    if kind != "pieces":
        return tokenizer
    state = json.loads(tokenizer.to_str()) | {"pre_tokenizer": None, "added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if splitting:
        tokenizer.pre_tokenizer = whole
    return tokenizer


def _ends(specials: list[str]) -> tuple[list[str], list[str]]:
    """Returns what stands around an input."""
    first = [token for token in ("[CLS]", "<bos>", "<|begin|>", "<s>") if token in specials]
    last = [token for token in ("[SEP]", "</s>") if token in specials and specials != LLAMA]
    return first, last


def draw_texts(count: int, seed: int) -> list[str]:
    """Draws texts of digits, line breaks, accents, Chinese, emoji and an added token."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        words = rng.choices([*WORDS, "<code>"], k=rng.randint(1, 9))
        texts.append("".join(word + rng.choice(GAPS) for word in words))
    return texts
