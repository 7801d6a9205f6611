"""Tokenizers of every kind that checkpoints have, trained on a few lines, with a chat template of ChatML's form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformers as untyped
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

transformers: Any = untyped

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")  # special
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, not special; the template names some
BLANKS = ("\n\n", "<table>")  # added, and ordinary text
LINES = [
    "the quick brown fox jumps over the lazy dog", "user assistant system tool hello there, how are you? fine!",
    "im_start im_end think tool_call < | > / { } [ ] \" : , . user\n assistant\n", "0123456789 names and arguments",
] * 5  # fmt: skip

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "\n{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def _byte_level() -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    return inner


def _sentencepiece(scheme: str) -> Tokenizer:
    """Its control strings are words of the vocabulary, as in sentencepiece's."""
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.Sequence([normalizers.NFKC()])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", *CONTROLS]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return inner


def _llama() -> Tokenizer:
    """BPE over sentencepiece's letters, whose normalizer writes a blank before each piece of text."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=430, special_tokens=first, show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    return inner


def _wordpiece() -> Tokenizer:
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    return inner


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "unigram": lambda: _sentencepiece("always"),
    "unigram-first": lambda: _sentencepiece("first"),
    "llama": _llama,
    "wordpiece": _wordpiece,
}
#: How control tokens are added: name -> fields of an AddedToken.
FLAGS: dict[str, dict[str, bool]] = {
    "plain": {"normalized": False},
    "normalized": {"normalized": True},
    "stripping": {"normalized": False, "lstrip": True, "rstrip": True},
}


@functools.cache
def tokenizer(kind: str, flags: str = "plain", template: str = TEMPLATE) -> Any:
    inner = KINDS[kind]()
    inner.add_special_tokens([AddedToken(one, **FLAGS[flags]) for one in CONTROLS])
    inner.add_tokens([AddedToken(one, **FLAGS[flags]) for one in MARKUP])
    inner.add_tokens([AddedToken(one, normalized=False) for one in BLANKS])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", bos_token="<s>")
    made.chat_template = template
    return made


def controls(made: Any) -> frozenset[int]:
    """The ids of what controls a chat."""
    return frozenset(made.convert_tokens_to_ids([*CONTROLS, *MARKUP]))
