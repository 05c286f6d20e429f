"""Text to token ids and back, against transformers and the tokenizers library."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.checkpoint import Checkpoint, find
from surefoot.errors import CheckpointError, InvalidRequest

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\ttabs \n\n newlines\r\n",
    "It's we'll I'd CAN'T",
    "def f(x):\n    return x ** 2  # ±½",
    "Grüße, naïve café, Ωμέγα, Привет",
    "漢字かな交じり文、한국어 עברית العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|><|im_end|> b <|im_ end|>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find("smollm2"))


def test_special_tokens_of_the_embedded_model(tokenizer: Tokenizer) -> None:
    """Ids, count and specials are those of SmolLM2's card."""
    assert tokenizer.token_count == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.chat_template
    assert "<|im_start|>" in tokenizer.chat_template


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """Decoding what was encoded gives the text, special tokens included where they are not skipped."""
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.slow
def test_equals_transformers() -> None:
    """Without digits, token ids are those of transformers' tokenizer for the same GGUF, and so is decoding."""
    transformers = pytest.importorskip("transformers")
    checkpoint = find("smollm2")
    ours = load_tokenizer(checkpoint)
    theirs = transformers.AutoTokenizer.from_pretrained(str(checkpoint.path.parent), gguf_file=checkpoint.path.name)
    for text in TEXTS:
        text = text.replace("2", "x")
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    messages = [
        {"role": "user", "content": "Hello <|im_end|>"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "  Bye\n"},
    ]
    for conversation in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        for generation in (True, False):
            text = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation)
            assert ours.render_chat(conversation, add_generation_prompt=generation) == text
            ids = theirs.apply_chat_template(conversation, add_generation_prompt=generation, return_dict=False)
            assert ours.encode_chat(conversation, add_generation_prompt=generation) == ids


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    """The GGUF's pre-tokenizer `smollm` makes a token of every digit, whatever stands around it."""
    for text in ("1234", "a1b22", "x 19 y", "٣٤"):
        digits = [tokenizer.token_text(token) for token in tokenizer.encode(text)]
        assert all(sum(char.isdigit() for char in piece) <= 1 for piece in digits)
    assert [tokenizer.token_text(token) for token in tokenizer.encode("in 2026")] == ["in", " ", "2", "0", "2", "6"]


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    """A text that is not Unicode is a 400 that says where, in prompts and in chats."""
    with pytest.raises(InvalidRequest, match="character 2 is '\\\\ud83d'"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.min_tokens("\udc00")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud800"}])


def test_id_out_of_range_is_refused(tokenizer: Tokenizer) -> None:
    """Decoding an id that is not in the vocabulary is a 400 with its range."""
    for token in (-1, 49152, 1 << 40):
        with pytest.raises(InvalidRequest, match="0 to 49151"):
            tokenizer.decode([5000, token])


def test_token_bytes_and_text(tokenizer: Tokenizer) -> None:
    """A token's bytes joined are the text's bytes; the text of a part of a character shows U+FFFD."""
    text = "naïve 🙂 <|im_end|>"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    parts = [token for token in tokenizer.encode("𓀀") if len(tokenizer.token_bytes(token)) == 1]
    assert parts
    assert all(tokenizer.token_text(token) == "\ufffd" for token in parts)


def test_min_tokens_bounds_from_below(tokenizer: Tokenizer) -> None:
    """The bound never exceeds the number of tokens, not even for what the tokenizer compresses or drops."""
    for text in [
        *TEXTS,
        " " * 5000,
        "#" * 4000,
        "\n" + " " * 80,
        "\x04" * 1000,
        "<|im_start|>" * 100,
        "\x04" + "#" * 81,
    ]:
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text)), text[:20]
    assert tokenizer.min_tokens("word " * 100_000) >= 5000


def test_encoding_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """While a long text is encoded in one thread, others get their turn: the server's event loop must not stop."""
    text = "The quick brown fox jumps over the lazy dog. " * 8000
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


# ---- Hugging Face directories


def save(folder: Path, backend: Backend, **config: Any) -> Checkpoint:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint(kind="hf", path=folder, name="tiny")


def byte_level() -> Backend:
    letters = [*"abcdefgh", "Ġ", "Ċ", "Ã", "©", "<unk>"]
    backend = Backend(models.BPE({text: token for token, text in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return backend


def sentencepiece() -> Backend:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"<unk>": 256, "▁": 257, "a": 258, "b": 259, "▁a": 260}
    backend = Backend(models.BPE(vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>")])
    return backend


def test_directory_equals_gguf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The embedded tokenizer written as tokenizer.json gives the same ids, bytes and bound."""
    checkpoint = save(tmp_path, tokenizer._backend, bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"})
    found = load_tokenizer(checkpoint)
    assert (found.token_count, found.bos_token_id, found.eos_token_id) == (49152, 1, 2)
    assert found.special_ids == tokenizer.special_ids
    for text in TEXTS:
        assert found.encode(text) == tokenizer.encode(text)
        assert found.min_tokens(text) == tokenizer.min_tokens(text)


def test_sentencepiece_directory(tmp_path: Path) -> None:
    """A tokenizer with ▁ for spaces and byte fallback decodes as the library does, its first space stripped."""
    backend = sentencepiece()
    found = load_tokenizer(save(tmp_path, backend))
    for text in ("a b", " a", "é a🙂b", "aab"):
        ids = found.encode(text, add_special_tokens=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert found.decode(ids) == backend.decode(ids) == text
        assert found.min_tokens(text) <= len(ids)


def test_truncation_of_the_file_is_off(tmp_path: Path) -> None:
    """A tokenizer.json that was saved with truncation and padding does not cut or fill prompts."""
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    found = load_tokenizer(save(tmp_path, backend))
    assert len(found.encode("abcdefgh")) == 8
    assert len(found.encode("abc")) == 3


def test_dropped_bytes_do_not_count(tmp_path: Path) -> None:
    """Bytes that no token stands for are dropped by the tokenizer, so they do not count in the bound."""
    found = load_tokenizer(save(tmp_path, byte_level()))
    assert found.encode("xyz") == []
    assert found.min_tokens("xyz") == 0
    assert found.min_tokens("a" * 50) == 10  # the longest token, <unk>, has 5 bytes


def test_chat_template_sources(tmp_path: Path) -> None:
    """chat_template.jinja comes before tokenizer_config.json, where of a list the default counts."""
    messages = [{"role": "user", "content": "x"}]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}two"}]
    for template, rendered in (("one{{ eos_token }}", "one</s>"), (named, "<s>two")):
        checkpoint = save(tmp_path, byte_level(), bos_token="<s>", eos_token="</s>", chat_template=template)
        assert load_tokenizer(checkpoint).render_chat(messages) == rendered
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_tokenizer(checkpoint).render_chat(messages) == "three"


def test_no_chat_template(tmp_path: Path) -> None:
    """A chat with a base model is a 400 that points at /v1/completions."""
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        load_tokenizer(save(tmp_path, byte_level())).render_chat([{"role": "user", "content": "x"}])


def test_unreadable_directories(tmp_path: Path) -> None:
    """A missing or damaged tokenizer.json, and an unknown kind of tokenizer, are named."""
    checkpoint = Checkpoint(kind="hf", path=tmp_path, name="tiny")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(checkpoint)
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        load_tokenizer(save(tmp_path, backend))


# ---- GGUF

GGUF: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "Ġ", "ab", "[user]"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def gguf_tokenizer(write_gguf: Any, **change: Any) -> Tokenizer:
    metadata = GGUF | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    path = write_gguf({key: value for key, value in metadata.items() if value is not None}, {})
    return load_tokenizer(Checkpoint(kind="gguf", path=path, name="tiny"))


def test_gguf_special_tokens_around_a_text(write_gguf: Any) -> None:
    """BOS and EOS are added where the metadata asks for it, and only where special tokens are asked for."""
    assert gguf_tokenizer(write_gguf).encode("ab a") == [5, 4, 2]
    both = gguf_tokenizer(write_gguf, add_bos_token=True, add_eos_token=True)
    assert both.encode("ab a") == [0, 5, 4, 2, 1]
    assert both.encode("ab a", add_special_tokens=False) == [5, 4, 2]
    assert gguf_tokenizer(write_gguf, add_bos_token=True).encode("b") == [0, 3]


def test_gguf_user_defined_tokens_show(write_gguf: Any) -> None:
    """A user-defined token is matched whole in text and is not hidden when special tokens are."""
    found = gguf_tokenizer(write_gguf)
    assert found.encode("a[user]</s>b") == [2, 6, 1, 3]
    assert found.decode([2, 6, 1, 3]) == "a[user]b"
    assert found.decode([2, 6, 1, 3], skip_special_tokens=False) == "a[user]</s>b"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "llama"}, "tokenizer 'llama'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ["a z"]}, "merges do not fit"),
        ({"merges": ["ab"]}, "merges do not fit"),
    ],
)
def test_gguf_tokenizers_that_are_not_supported(write_gguf: Any, change: dict[str, Any], said: str) -> None:
    """Another kind of tokenizer, and merges that are missing or do not fit, are named."""
    with pytest.raises(CheckpointError, match=said):
        gguf_tokenizer(write_gguf, **change)


def test_another_chat_template_than_the_checkpoints() -> None:
    """A template that the operator gives goes before the checkpoint's own."""
    tokenizer = load_tokenizer(find("smollm2"), chat_template="<{{ messages[0].content }}>")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<hi>"
