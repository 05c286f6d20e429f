"""ChatGLM4Tokenizer, the tokenizer of GLM-4 checkpoints that bring their own code, without running that code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from surefoot.api.tiktoken import make_backend, read_ranks
from surefoot.errors import CheckpointError

CLASS: Final = "ChatGLM4Tokenizer"
"""`tokenizer_class` in tokenizer_config.json."""
OPENING: Final = ("[gMASK]", "<sop>")
"""Every GLM-4 sequence starts with these two tokens, once."""
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE: Final = """\
[gMASK]<sop>
{%- for message in messages %}
    {%- if message.tools %}
        {{- '<|system|>\n你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，' }}
        {{- '你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具' }}
        {%- for tool in message.tools %}
            {{- '\n\n## ' ~ tool.function.name ~ '\n\n' ~ tool.function | tojson(indent=4) }}
            {{- '\n在调用上述函数时，请使用 Json 格式表示调用的参数。' }}
        {%- endfor %}
    {%- endif %}
    {%- if message.content %}
        {{- '<|' ~ message.role ~ '|>' ~ (message.metadata or '') ~ '\n' ~ message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""GLM-4's format, for checkpoints that have it only as code: a role ends at the next one, tools are one more system
turn, an assistant's turn that calls a function has its name where the others have nothing."""


def read_backend(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of tokenizer.model, with the special tokens of `config`, which is tokenizer_config.json.

    Raises CheckpointError naming the file for what is missing or does not fit.
    """
    where = folder / "tokenizer_config.json"
    try:
        listed = {int(token): str(about["content"]) for token, about in config["added_tokens_decoder"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: added_tokens_decoder is missing or not a table of tokens: {error!r}"
        ) from error
    backend = make_backend(read_ranks(folder / "tokenizer.model"), PATTERN, listed, where)
    ids = [backend.token_to_id(text) for text in OPENING]
    if None in ids:
        raise CheckpointError(
            f"{where}: added_tokens_decoder lacks {' or '.join(OPENING)}, which start every sequence."
        )
    backend.post_processor = TemplateProcessing(
        single=[*OPENING, "$A"], special_tokens=list(zip(OPENING, ids, strict=True))
    )
    return backend
