"""Chat templates: transformers' functions, its white space, and errors that name the message."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from surefoot.api.template import ChatTemplate
from surefoot.errors import CheckpointError, InvalidRequest

USER = {"role": "user", "content": "Hi"}
LOOP = """\
{% for message in messages %}
  {% if message.role == 'tool' %}
{{ raise_exception('no tools: ' ~ loop.index0) }}
  {% endif %}
<{{ message['role'] + ': ' + message['content'] }}>
{% endfor %}"""


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: str) -> str:
    return ChatTemplate(source, variables).render([USER] if messages is None else messages)


def test_blocks_leave_no_white_space() -> None:
    """Lines that hold only a block vanish, as in transformers."""
    assert render(LOOP) == "<user: Hi>\n"


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ bos_token }}{{ messages | length }}", "<s>1"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{% if tools %}t{% endif %}{% if documents is none %}n{% endif %}", "n"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ],
)
def test_what_templates_use(source: str, rendered: str) -> None:
    """The variables, filters, functions and tags that checkpoints' templates rely on are there."""
    assert render(source, bos_token="<s>") == rendered


@pytest.mark.slow
def test_equals_transformers() -> None:
    """A template with all of it renders to the same text as in transformers."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = LOOP + "{% generation %}{{ messages | tojson }}{% endgeneration %}\n\n{{ eos_token }}\n"
    messages = [USER, {"role": "assistant", "content": "<b>ü</b>\n"}, USER]
    [theirs], _ = utils.render_jinja_template([messages], chat_template=source, eos_token="</s>")
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(messages, add_generation_prompt=False) == theirs


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"role": "tool", "content": "x"}, "no tools"),
        ({"role": "assistant", "content": None}, "can only concatenate str"),
        ({"role": "assistant"}, "content"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 6])
def test_the_message_at_fault_is_named(bad: dict[str, Any], said: str, before: int) -> None:
    """What a template refuses is a 400 with the message's index, its role and the template's reason."""
    messages = [USER] * before + [bad] + [USER] * 3
    with pytest.raises(InvalidRequest, match=said) as caught:
        render(LOOP, messages)
    assert f"messages[{before}] (role {bad['role']!r})" in caught.value.message
    assert caught.value.param == f"messages.{before}"


def test_an_empty_conversation_is_refused_by_name() -> None:
    """A template that needs a first message refuses none of them with a 400."""
    with pytest.raises(InvalidRequest, match="refuses messages"):
        render("{{ messages[0]['role'] + 'x' }}", [])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_templates_are_confined(source: str) -> None:
    """A template can neither change the conversation nor reach Python's internals nor loop without end."""
    with pytest.raises(InvalidRequest):
        render(source)


def test_a_template_that_does_not_parse() -> None:
    """A damaged template is found when the model is loaded."""
    with pytest.raises(CheckpointError, match="chat template is not valid"):
        ChatTemplate("{% if %}", {})
