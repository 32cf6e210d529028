"""Tokenizers of the SentencePiece kinds that language models ship with, trained on a few words."""

import json
from pathlib import Path

TEXT = "hello world it was good . [INST] user assistant hi there the cat sat bad <|user|> hello"
LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"
)
TINYLLAMA_CHAT = (
    "{% for m in messages %}{{ '<|user|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ENDED_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ 'user' + eos_token + m['content'] + eos_token }}"
    "{% endfor %}"
)
CHATS = {"llama": LLAMA_CHAT, "tinyllama": TINYLLAMA_CHAT, "behind a special": ENDED_CHAT}
# How tokenizer.json writes the space before a text: one form of Llama 2's, its later form, that of
# Mistral 7B v0.3, the first form under another class, Gemma's, which has none, and that of a
# tokenizer saved with add_prefix_space=False.
KINDS = ("always", "first", "llama", "prepend", "gemma", "never")


def write_pieces(folder: Path, kind: str, chat: str = "") -> Path:
    """Writes a byte-fallback BPE of a kind of KINDS into a folder."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from tokenizers import pre_tokenizers as before

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = before.Metaspace(prepend_scheme="always", split=True)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer = Tokenizer.from_str(
        json.dumps(json.loads(tokenizer.to_str()) | {"pre_tokenizer": None})
    )
    replaced = normalizers.Replace(" ", "▁")
    if kind in ("always", "first", "never"):
        tokenizer.pre_tokenizer = before.Metaspace(prepend_scheme=kind, split=False)
    elif kind == "gemma":
        tokenizer.normalizer = replaced
        tokenizer.pre_tokenizer = before.Split(" ", "merged_with_previous")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = dict(
        tokenizer_class="LlamaTokenizer" if kind == "llama" else "PreTrainedTokenizerFast",
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True, legacy=True,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if chat:
        (folder / "chat_template.jinja").write_text(chat)
    return folder
