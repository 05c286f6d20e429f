"""Text ↔ token ids, by the checkpoint's own tokenizer.

A token is a piece of bytes, and a text is the bytes of its tokens read as UTF-8: `Tokenizer.token_bytes` is the one
table that decoding, streaming (`api.detok`) and log-probabilities read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from surefoot import gguf
from surefoot.api import chatglm
from surefoot.api.template import ChatTemplate, Message, Tool
from surefoot.api.tiktoken import byte_alphabet
from surefoot.checkpoint import Checkpoint
from surefoot.errors import CheckpointError, InvalidRequest
from surefoot.spec import read_json
from surefoot.types import SamplingParams, Vocabulary

_SPACE = "\u2581"  # how SentencePiece writes a space
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_SPECIALS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class Tokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self, backend: Backend, *, specials: Mapping[str, str], chat_template: str | None, where: Path
    ) -> None:
        """`specials` maps names such as bos_token to the token's text; `where` is the file that errors name."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self.token_count = max(vocab.values()) + 1
        """One more than the largest token id."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, about in added.items() if about.special)
        to_bytes, self.strips_first_space = _byte_rule(backend, where)
        self._bytes = [b""] * self.token_count
        for text, token in vocab.items():
            self._bytes[token] = to_bytes(text)
        self.bos_token_id = vocab.get(specials.get("bos_token", ""))
        self.eos_token_id = vocab.get(specials.get("eos_token", ""))
        self._template = None if chat_template is None else ChatTemplate(chat_template, specials)
        self._opening = chatglm.OPENING if vocab.keys() >= set(chatglm.OPENING) else ()
        self._longest, self._dropped = self._bound(any(about.lstrip or about.rstrip for about in added.values()))

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, where the model has one."""
        return None if self._template is None else self._template.source

    @property
    def template(self) -> ChatTemplate | None:
        return self._template

    @property
    def reply_prefix(self) -> str:
        """Newlines that a model writes before each answer of a chat, which are no part of it (`ChatTemplate`)."""
        return "" if self._template is None else self._template.reply_prefix

    def vocabulary(self) -> Vocabulary:
        """What the worker knows of text: what tokens stand for."""
        return Vocabulary(tokens=tuple(self._bytes), specials=tuple(sorted(self.special_ids)))

    def special_id(self, text: str) -> int | None:
        """The id of a special token by its text."""
        token = self._backend.token_to_id(text)
        return token if token in self.special_ids else None

    # ---- text → ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are read as such, as transformers does.

        With `add_special_tokens` the checkpoint's own (such as a leading BOS) are put around; GLM's opening is not put
        before a text that has it. Raises InvalidRequest for a text that is not Unicode: half of a surrogate pair.
        """
        _utf8(text)
        if self._opening and text.startswith("".join(self._opening)):
            add_special_tokens = False
        # A batch of one: unlike `encode` it lets other threads run meanwhile, and it skips the offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def banning(self, params: SamplingParams) -> SamplingParams:
        """Parameters whose bad words are token ids too: each word by itself, and as it stands after a space."""
        if not params.bad_words:
            return params
        found = [self.encode(word.lstrip(), add_special_tokens=False) for word in params.bad_words]
        found += [self.encode(" " + word.lstrip(), add_special_tokens=False) for word in params.bad_words]
        return replace(params, bad_token_ids=(*params.bad_token_ids, *dict.fromkeys(map(tuple, filter(None, found)))))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as one text. Raises InvalidRequest where the model has no template or refuses a message."""
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template; send a prompt to /v1/completions instead.", param="messages"
            )
        text = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        opening = "".join(self._opening)
        return text if text.startswith(opening) else opening + text

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Nothing is put around it: a template writes its special tokens itself."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def min_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))`, at a millisecond a megabyte: bytes over those of the longest token.

        It is 0 where this tokenizer may drop or rewrite text. Raises InvalidRequest like `encode`.
        """
        data = _utf8(text)
        return -(-len(data.translate(None, self._dropped)) // self._longest) if self._longest else 0

    def _bound(self, strips: bool) -> tuple[int, bytes]:
        """Bytes of the longest token (0: no bound) and the bytes that no token stands for, which encoding drops."""
        # A token that swallows the white space around it, or a normalizer, makes text shorter than its bytes.
        if strips or self.strips_first_space or self._backend.normalizer is not None:
            return 0, b""
        single = {data for data in self._bytes if len(data) == 1}
        return max(map(len, self._bytes)), bytes(byte for byte in range(256) if bytes([byte]) not in single)

    # ---- ids → text

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for, maybe a part of a character. Raises InvalidRequest for an id out of range."""
        if not 0 <= token < self.token_count:
            raise InvalidRequest(f"Token id {token} is outside of the vocabulary: 0 to {self.token_count - 1}.")
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """A token's bytes as text; parts of a character show as U+FFFD. Raises like `token_bytes`."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, bytes that are not UTF-8 as U+FFFD. Raises InvalidRequest for an id out of range."""
        hidden = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(token) for token in ids if token not in hidden)
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")


def load_tokenizer(checkpoint: Checkpoint, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint: from GGUF metadata, or from tokenizer.json beside config.json; with another
    `chat_template` than the checkpoint's own where one is given.

    Raises CheckpointError naming the file, for what is missing or of a kind that is not supported.
    """
    if checkpoint.kind == "gguf":
        return _from_gguf(gguf.read_header(checkpoint.path), chat_template)
    return _from_directory(checkpoint.path, chat_template)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text is not valid Unicode: character {error.start} is {text[error.start]!r}, "
            "half of a surrogate pair without the other."
        ) from error


# ---- what a token's name means --------------------------------------------------------------------------------------


def _byte_rule(backend: Backend, where: Path) -> tuple[Callable[[str], bytes], bool]:
    """How a token's name becomes bytes, and whether a text loses its first space; both by the tokenizer's decoder."""
    steps = _decoder_steps(backend)
    if steps == {"ByteLevel"}:
        alphabet = {char: byte for byte, char in byte_alphabet().items()}

        def byte_level(name: str) -> bytes:
            try:
                return bytes([alphabet[char] for char in name])
            except KeyError:  # an added token, written in plain text
                return name.encode()

        return byte_level, False
    if steps == {"Metaspace"}:
        return _sentencepiece, True
    if not steps:  # words, which are joined by spaces
        return lambda name: f" {name}".encode(), True
    if "Replace" in steps and steps <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece, "Strip" in steps
    raise CheckpointError(f"{where}: a tokenizer that decodes by {sorted(steps)} is not supported; byte-level BPE is.")


def _decoder_steps(backend: Backend) -> set[str]:
    """Names of the decoder's steps, as tokenizer.json writes them."""
    if backend.decoder is None:
        return set()
    about = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in about.get("decoders", [about])}


def _sentencepiece(name: str) -> bytes:
    """`▁the` → ` the`, `<0x0A>` → a newline."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes.fromhex(name[3:5])
    return name.replace(_SPACE, " ").encode()


# ---- GGUF -----------------------------------------------------------------------------------------------------------

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
}
"""How text is cut before merging, by `tokenizer.ggml.pre`."""


def _from_gguf(header: gguf.Header, chat_template: str | None) -> Tokenizer:
    data = header.metadata
    backend = _gguf_backend(header)
    tokens = data["tokenizer.ggml.tokens"]
    specials = {}
    for key, name in _GGUF_SPECIALS.items():
        token = data.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            specials[name] = tokens[token]
    ends = [
        specials[f"{end}_token"] if data.get(f"tokenizer.ggml.add_{end}_token") and f"{end}_token" in specials else None
        for end in ("bos", "eos")
    ]
    if any(ends):
        first, last = ends
        backend.post_processor = TemplateProcessing(
            single=[piece for piece in (first, "$A", last) if piece],
            special_tokens=[(piece, tokens.index(piece)) for piece in dict.fromkeys(ends) if piece],
        )
    template = chat_template or data.get("tokenizer.chat_template")
    return Tokenizer(backend, specials=specials, chat_template=template, where=header.path)


def _gguf_backend(header: gguf.Header) -> Backend:
    data = header.metadata
    kind, cut = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{header.path}: tokenizer {kind!r} with pre-tokenizer {cut!r} is not supported; supported is 'gpt2' with "
            f"{', '.join(map(repr, _PRE_TOKENIZERS))}. A Hugging Face directory of the model will work."
        )
    tokens, pairs, kinds = (_gguf_list(header, key) for key in ("tokens", "merges", "token_type"))
    merges = [tuple(pair.split(" ")) for pair in pairs]
    try:
        backend = Backend(BPE(vocab={text: token for token, text in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises its bare Exception for merges that do not fit the vocabulary
        raise CheckpointError(f"{header.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    backend.pre_tokenizer = _PRE_TOKENIZERS[cut]
    backend.decoder = ByteLevelDecoder()
    added = list(zip(tokens, kinds, strict=False))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text, kind in added if kind == _CONTROL])
    backend.add_tokens([AddedToken(text, normalized=False) for text, kind in added if kind == _USER_DEFINED])
    return backend


def _gguf_list(header: gguf.Header, key: str) -> list[Any]:
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.{key} is missing.")
    return value


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def _from_directory(folder: Path, chat_template: str | None) -> Tokenizer:
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    path, backend, built_in = _directory_backend(folder, config)
    specials = {}
    for name in _SPECIALS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            specials[name] = text
    template = chat_template or _template_of(folder, config) or built_in
    return Tokenizer(backend, specials=specials, chat_template=template, where=path)


def _directory_backend(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Backend, str | None]:
    """The file that was read, the tokenizer in it, and the chat template to use where the checkpoint has none."""
    path, ranks = folder / "tokenizer.json", folder / "tokenizer.model"
    if not path.exists() and ranks.exists() and config.get("tokenizer_class") == chatglm.CLASS:
        return ranks, chatglm.read_backend(folder, config), chatglm.CHAT_TEMPLATE
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing; a tokenizer.model alone cannot be read unless it is a {chatglm.CLASS}'s, convert it "
            "to tokenizer.json."
        )
    try:
        return path, Backend.from_file(str(path)), None
    except Exception as error:  # the library raises its bare Exception for a file that it cannot read
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json: a text, or a list in which one is called default."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None
