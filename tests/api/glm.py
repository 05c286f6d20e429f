"""A GLM-4 checkpoint's tokenizer files, with ranks trained here on a little of everything."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path

from tokenizers import Regex, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from surefoot.api.chatglm import PATTERN
from surefoot.api.tiktoken import byte_alphabet

SPECIALS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
)  # fmt: skip
CORPUS = (
    "The quick brown fox jumps over the lazy dog, and it's what we'd expect of foxes; they're quick, aren't they?",
    "人工智能助手可以回答问题，编写代码，翻译文章。你好，世界！今天天气很好，我们去公园散步吧。",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\n\n"
    "print([fib(i) for i in range(100)])",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀😀😀 é e\u0301 ñ ü Grüße, naïve café, Ωμέγα, Привет, עברית العربية 한국어 漢字かな交じり文",
    "{\"city\": \"Paris\", \"days\": 3}\n<|user|>\r\n\r\n\t\t"
    "x = 12345678.90 == 1e-5  # ====== ------ ......    \n\n\n\n",
    "get_weather\n{\"city\": \"Paris\"}",
)  # fmt: skip


@cache
def ranks(size: int = 1200) -> dict[bytes, int]:
    """Byte-pair ranks of the corpus: all single bytes, then what merging them made."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = byte_alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=list(alphabet.values()), show_progress=False)
    backend.train_from_iterator(list(CORPUS) * 3, trainer)
    bytes_of = {char: byte for byte, char in alphabet.items()}
    return {bytes(bytes_of[char] for char in name): rank for name, rank in backend.get_vocab().items()}


def write_tokenizer(folder: Path, **config: object) -> dict[str, int]:
    """tokenizer.model and tokenizer_config.json; returns the ids of the special tokens."""
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks().items()]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    ids = {text: len(lines) + at for at, text in enumerate(SPECIALS)}
    added = {str(token): {"content": text, "special": True} for text, token in ids.items()}
    written = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added, "eos_token": SPECIALS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(written | config))
    return ids
