"""Streaming text: whatever the tokens, the pieces are the whole, cut at the first stop string."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from surefoot.api.detok import Detokenizer
from surefoot.api.tokenizer import Tokenizer, load_tokenizer
from surefoot.checkpoint import find

TOKENIZER = load_tokenizer(find("smollm2"))
BYTES = [token for token in range(17, TOKENIZER.token_count) if len(TOKENIZER.token_bytes(token)) == 1]
ANY_TOKEN = st.integers(0, TOKENIZER.token_count - 1) | st.integers(0, 16) | st.sampled_from(BYTES)
TEXT = st.text(st.sampled_from("abé漢🙂👩‍👧\n .") | st.characters(exclude_categories=("Cs",)), max_size=30)
TOKENS = st.lists(ANY_TOKEN, max_size=40) | TEXT.map(TOKENIZER.encode)


def stream(ids: list[int], detok: Detokenizer) -> str:
    return "".join(map(detok.push, ids)) + detok.finish()


def cut(text: str, stop: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    """The contract, without streaming: cut at the stop string that is complete first, the longest of those."""
    ends = [(text.index(word) + len(word), -len(word), word) for word in stop if word in text]
    if not ends:
        return text, None
    end, _, word = min(ends)
    return text[: end if include else end - len(word)], word


@given(TOKENS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_are_the_library_s_decoding(ids: list[int], skip: bool) -> None:
    """Pushes and finish, joined, equal the tokenizers library's decoding of all tokens, invalid bytes included."""
    whole = TOKENIZER._backend.decode(ids, skip_special_tokens=skip)
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == whole
    assert stream(ids, Detokenizer(TOKENIZER, skip_special_tokens=skip)) == whole


@given(
    st.text("ab\n🙂", max_size=40).map(TOKENIZER.encode) | TOKENS,
    st.lists(st.text("ab\n🙂", min_size=1, max_size=5), max_size=4).map(tuple),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_output_is_cut_at_the_first_stop_string(ids: list[int], stop: tuple[str, ...], include: bool) -> None:
    """With stop strings the pieces equal the whole text cut at the first complete one, which `stopped` names."""
    detok = Detokenizer(TOKENIZER, stop=stop, include_stop=include)
    assert (stream(ids, detok), detok.stopped) == cut(TOKENIZER.decode(ids), stop, include=include)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3).map(tuple))
@settings(max_examples=100, deadline=None)
def test_held_text_is_the_beginning_of_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    """After each token exactly that much is held back as could still become a stop string, and no more."""
    detok, shown, seen = Detokenizer(TOKENIZER, stop=stop), "", ""
    for token in TOKENIZER.encode(text):
        shown += detok.push(token)
        seen += TOKENIZER.token_text(token)
        if detok.stopped is not None:
            break
        starts = {word[:size] for word in stop for size in range(len(word))}
        assert seen[len(shown) :] == max((start for start in starts if seen.endswith(start)), key=len)


def test_characters_wait_for_their_last_byte() -> None:
    """Bytes of an unfinished character show nothing; a proven invalid one is U+FFFD at once."""
    waves = TOKENIZER.encode("𓀀")
    assert len(waves) > 1
    detok = Detokenizer(TOKENIZER)
    assert [detok.push(token) for token in waves] == [""] * (len(waves) - 1) + ["𓀀"]
    [letter] = TOKENIZER.encode("a")
    assert detok.push(waves[0]) == ""
    assert detok.push(letter) == "\ufffda"
    assert detok.push(waves[0]) == ""
    assert detok.finish() == "\ufffd"


def test_stop_string_across_tokens() -> None:
    """A stop string that begins in one token and ends in another is never shown, nor what follows it."""
    ids = TOKENIZER.encode("One two three four")
    detok = Detokenizer(TOKENIZER, stop=("wo thr",))
    pieces = [detok.push(token) for token in ids]
    assert "".join(pieces) == "One t"
    assert detok.stopped == "wo thr"
    assert detok.push(ids[0]) == ""
    assert detok.finish() == ""
    assert stream(ids, Detokenizer(TOKENIZER, stop=("wo thr",), include_stop=True)) == "One two thr"


def test_stop_string_that_does_not_come() -> None:
    """What was held back for a stop string that did not come is returned by finish."""
    [*ids] = TOKENIZER.encode("The end is nea")
    detok = Detokenizer(TOKENIZER, stop=("near",))
    assert "".join(map(detok.push, ids)) == "The end is "
    assert detok.finish() == "nea"
    assert detok.stopped is None


def test_stop_strings_do_not_count_below_min_tokens() -> None:
    """A stop string that a token below min_tokens completes is ordinary text; a later one counts."""
    ids = TOKENIZER.encode("x.x.x.x.")
    detok = Detokenizer(TOKENIZER, stop=(".",))
    text = "".join(detok.push(token, check_stop=index >= 5) for index, token in enumerate(ids))
    assert text == "x.x.x"
    assert detok.stopped == "."
    spanning = Detokenizer(TOKENIZER, stop=("x.",))
    assert spanning.push(ids[0], check_stop=False) == ""
    assert spanning.push(ids[1]) == ""
    assert spanning.stopped == "x."
    [a] = TOKENIZER.encode("a")
    overlapping = Detokenizer(TOKENIZER, stop=("aa",))
    assert [overlapping.push(a, check_stop=index == 2) for index in range(3)] == ["", "a", ""]
    assert overlapping.stopped == "aa"


def test_offset_is_where_the_next_token_begins() -> None:
    """`offset` counts characters decoded, whether they were returned or are held for a stop string."""
    detok = Detokenizer(TOKENIZER, stop=("nothing here",))
    offsets = []
    for token in TOKENIZER.encode("no nothing 漢"):
        offsets.append(detok.offset)
        detok.push(token)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert detok.offset == len("no nothing 漢")


def test_sentencepiece_text_loses_its_first_space_once() -> None:
    """A tokenizer that writes spaces as ▁ streams what it decodes: only the very first space is dropped."""
    backend = Backend(models.BPE({"▁a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3, "▁": 4, "<unk>": 5}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>")])
    tokenizer = Tokenizer(backend, specials={}, chat_template=None, where=find("smollm2").path)
    for ids in ([0, 1, 0], [6, 4, 0, 2, 3, 1], [2, 3, 4], []):
        assert stream(ids, Detokenizer(tokenizer)) == tokenizer.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("stop", [(), ("###", "\n\nUser:"), ("a" * 2000,)])
def test_a_long_output_costs_no_more_per_token(stop: tuple[str, ...]) -> None:
    """Pushing is linear: 20,000 tokens take well under a second, even against a stop string that nearly matches."""
    ids = TOKENIZER.encode("aaaa aaaa " * 4000)[:20_000]
    detok = Detokenizer(TOKENIZER, stop=stop)
    started = time.perf_counter()
    text = stream(ids, detok)
    assert time.perf_counter() - started < 2
    assert text == TOKENIZER.decode(ids)
