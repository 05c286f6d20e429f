"""ChatGLM4Tokenizer without its code, against tiktoken with the same ranks and pattern."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.api.chatglm import PATTERN
from surefoot.api.detok import Detokenizer
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError
from tests.api.glm import CORPUS, SPECIALS, ranks, write_tokenizer

tiktoken = pytest.importorskip("tiktoken")
PIECES = st.sampled_from(
    [" ", "\n", "\r", "\t", "=", "-", "a", "the ", "quick", "你", "助手", "，", "é", "e\u0301", "😀", "‍", "1", "42",
     "'s", "'LL", "'ſ", "_x", "\u00a0", "\u3000", "\ufeff"]
)  # fmt: skip
TEXT = st.lists(PIECES, max_size=40).map("".join) | st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def tokenizer_of(folder: Path) -> Tokenizer:
    return load_tokenizer(Checkpoint(kind="hf", path=folder, name="glm"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("glm")
    write_tokenizer(folder)
    return tokenizer_of(folder)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return tiktoken.Encoding("glm", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={})


@pytest.mark.parametrize("text", CORPUS)
def test_corpus_equals_tiktoken(glm: Tokenizer, oracle: Any, text: str) -> None:
    """English, Chinese, code, emoji and other scripts have tiktoken's ids, and come back as they were."""
    for end in range(0, len(text) + 1, 7):
        ids = oracle.encode_ordinary(text[:end])
        if "<|user|>" not in text:
            assert glm.encode(text[:end], add_special_tokens=False) == ids
        assert glm.decode(ids) == text[:end]


@given(text=TEXT)
@settings(max_examples=400, deadline=None)
def test_any_text_equals_tiktoken(glm: Tokenizer, oracle: Any, text: str) -> None:
    """Runs of white space, signs, letters and digits in any order, and any Unicode, have tiktoken's ids."""
    assert glm.encode(text, add_special_tokens=False) == oracle.encode_ordinary(text)


@given(ids=st.lists(st.integers(0, len(ranks()) - 1), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_tokens_decode_as_in_tiktoken(glm: Tokenizer, oracle: Any, ids: list[int]) -> None:
    """Tokens that end within a character decode as in tiktoken, whole and streamed."""
    wanted = oracle.decode_bytes(ids).decode("utf-8", "replace")
    assert glm.decode(ids) == wanted
    detok = Detokenizer(glm)
    assert "".join(map(detok.push, ids)) + detok.finish() == wanted


def test_special_tokens(glm: Tokenizer) -> None:
    """They follow the ranks, are read where they are written out, and are not shown."""
    first = len(ranks())
    assert glm.special_ids == frozenset(range(first, first + len(SPECIALS)))
    assert glm.token_count == first + len(SPECIALS)
    assert glm.eos_token_id == first
    ids = glm.encode("<|user|>hi", add_special_tokens=False)
    assert ids[0] == first + SPECIALS.index("<|user|>")
    assert glm.decode(ids) == "hi"


def test_the_opening_comes_once(glm: Tokenizer) -> None:
    """[gMASK]<sop> is put before a text, not before one that has it, and a template that lacks it gets it."""
    opening = [glm.special_id("[gMASK]"), glm.special_id("<sop>")]
    plain = glm.encode("hi", add_special_tokens=False)
    assert glm.encode("hi") == opening + plain
    assert glm.encode("[gMASK]<sop>hi") == opening + plain
    chat = [{"role": "user", "content": "hi"}]
    for special in (True, False):
        ids = glm.encode(glm.render_chat(chat), add_special_tokens=special)
        assert [ids.count(token) for token in opening] == [1, 1]


def test_a_template_without_the_opening_gets_it(tmp_path: Path) -> None:
    """The checkpoint's own template is used where there is one; the opening is put before what it renders."""
    write_tokenizer(tmp_path, chat_template="<|user|>\n{{ messages[0].content }}<|assistant|>")
    found = tokenizer_of(tmp_path)
    assert found.render_chat([{"role": "user", "content": "hi"}]) == "[gMASK]<sop><|user|>\nhi<|assistant|>"


def test_built_in_chat_format(glm: Tokenizer) -> None:
    """A newline after each role, nothing after each content, tools in a system turn, calls under their name."""
    function = {"name": "f", "description": "天气", "parameters": {"type": "object"}}
    chat = [
        {"role": "system", "content": "Be brief.", "tools": [{"type": "function", "function": function}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "metadata": "f", "content": "{}"},
        {"role": "observation", "content": "1"},
    ]
    assert glm.render_chat(chat) == (
        "[gMASK]<sop><|system|>\n你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具\n\n## f\n\n"
        '{\n    "name": "f",\n    "description": "天气",\n    "parameters": {\n        "type": "object"\n    }\n}\n'
        "在调用上述函数时，请使用 Json 格式表示调用的参数。"
        "<|system|>\nBe brief.<|user|>\nHi<|assistant|>f\n{}<|observation|>\n1<|assistant|>"
    )
    assert glm.reply_prefix == "\n"


def test_the_leading_newline_is_no_part_of_an_answer(glm: Tokenizer) -> None:
    """One newline at the start is dropped, streamed in any way; later ones and a start without it stay."""
    for text, wanted in (("\nHi\n", "Hi\n"), ("\n\nHi", "\nHi"), ("Hi\n", "Hi\n"), ("\n", ""), ("", "")):
        for ids in (glm.encode(text, add_special_tokens=False), [ranks()[bytes([byte])] for byte in text.encode()]):
            detok = Detokenizer(glm, prefix=glm.reply_prefix)
            assert "".join(map(detok.push, ids)) + detok.finish() == wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [*lines[:-1], b"!!! 5"], "is not base64 and a rank"),
        (lambda lines: [*lines[:-1], b"YWI="], "is not base64 and a rank"),
        (lambda lines: lines[:-2] + lines[-1:], "twice or missing"),
        (lambda lines: [*lines, base64.b64encode(b"zzzz") + b" 0"], "twice or missing"),
        (lambda lines: [line.replace(base64.b64encode(b"A") + b" ", b"QUFBQQ== ") for line in lines], "byte 0x41"),
        (lambda lines: lines[:-1], "special token '<|endoftext|>' has id"),
    ],
)
def test_a_damaged_vocabulary_is_named(tmp_path: Path, change: Any, said: str) -> None:
    """A line that is no rank, a rank or a byte that is missing, and special tokens elsewhere name the file."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(change(sorted(path.read_bytes().splitlines(), key=lambda line: int(line.split()[1])))))
    with pytest.raises(CheckpointError, match=said):
        tokenizer_of(tmp_path)


@pytest.mark.parametrize("listed", [None, [], {"x": {}}, {str(len(ranks())): {"content": "<|endoftext|>"}}])
def test_special_tokens_must_be_listed(tmp_path: Path, listed: Any) -> None:
    """Without its table of special tokens the vocabulary is not guessed."""
    write_tokenizer(tmp_path, added_tokens_decoder=listed)
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        tokenizer_of(tmp_path)
