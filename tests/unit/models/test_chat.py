import json
from pathlib import Path
from typing import Any

import pytest

from weir.errors import InvalidArgument, ModelError
from weir.models import chat
from weir.models.chat import ChatTemplate

SIMPLE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[go]{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]

# The constructs that the templates of Llama 3, Qwen and Mistral use.
REALISTIC = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}
{%- set ns = namespace(turns=0) %}
{%- for message in loop_messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('Only user and assistant roles, got ' + message.role) }}
    {%- endif %}
    {% generation %}{{ message.role }}: {{ message | tojson(indent=2) }}{% endgeneration %}
{%- endfor %}
{%- macro sign(x) %}<{{ x.strip() }}|{{ eos_token }}>{% endmacro %}
{{ sign(system) }}{{ ns.turns }} {% if not add_generation_prompt %}done{% endif %}
"""


def render(source: str, messages: Any, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_generation_prompt_is_optional() -> None:
    assert render(SIMPLE, HELLO) == "[user]hello[go]"
    assert render(SIMPLE, HELLO, add_generation_prompt=False) == "[user]hello"


def test_renders_as_transformers_does() -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "system", "content": " Be <brief> & 'kind'\n"},
        {"role": "user", "content": 'Grüße <b>"x"</b> \u2028 你'},
        {"role": "skip", "content": "-"},
        {"role": "assistant", "content": "  ok", "name": "weir"},
    ]
    source = REALISTIC.replace('{%- if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}', "")
    for prompt in (True, False):
        rendered, _ = reference.render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
        )
        assert render(source, messages, add_generation_prompt=prompt) == rendered[0]


def test_json_filter_is_plain() -> None:
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )


def test_date_is_injected_or_undefined() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no date{% endif %}"
    assert render(source, HELLO, date="2024-07-26") == "26 Jul 2024"
    assert render(source, HELLO) == "no date"


def test_further_variables_reach_the_template_but_cannot_replace_the_messages() -> None:
    source = "{{ enable_thinking }} {{ tools is none }} {{ messages | length }}"
    assert render(source, HELLO, variables={"enable_thinking": False, "messages": []}) == "False True 1"


def test_content_parts_of_type_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(SIMPLE, [{"role": "user", "content": parts}]) == "[user]one\ntwo[go]"


@pytest.mark.parametrize(
    ("messages", "field", "limit"),
    [
        ([], "messages", "must hold 1 to 4096 messages"),
        (["hi"], "messages[0]", "must be an object"),
        ([{"content": "x"}], "messages[0].role", "must be a non-empty string"),
        ([*HELLO, {"role": "user"}], "messages[1].content", "must be a string or a list of text parts"),
        ([{"role": "user", "content": 3}], "messages[0].content", "must be a string or a list of text parts"),
        (
            [{"role": "user", "content": ["x"]}],
            "messages[0].content[0]",
            "must be an object with type and text",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages[0].content[1].type",
            'only parts of type "text" are supported',
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "must be a string",
        ),
    ],
)
def test_malformed_messages_are_named(messages: Any, field: str, limit: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(SIMPLE, messages)
    assert caught.value.field == field
    assert limit in caught.value.limit


def test_unknown_part_type_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'input_audio'"):
        render(SIMPLE, [{"role": "user", "content": [{"type": "input_audio"}]}])


def test_a_tool_call_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert render("{{ messages[0].tool_calls[0].id }}", [call]) == "1"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.x.y }}", "has no attribute 'x'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_what_a_template_refuses_is_an_invalid_argument(source: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(source, HELLO)
    assert caught.value.field == "messages"
    assert reason in caught.value.limit


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="at most 262144 characters, got 262145"):
        ChatTemplate("x" * 262145, {})
    monkeypatch.setattr(chat, "MAX_CONTENT_CHARS", 8)
    with pytest.raises(InvalidArgument, match="at most 8 characters together"):
        render(SIMPLE, [{"role": "user", "content": "x" * 9}])
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARS", 10)
    with pytest.raises(InvalidArgument, match="must render to at most 10 characters"):
        render(SIMPLE, HELLO)
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARS", 1000)
    monkeypatch.setattr(chat, "MAX_PROMPT_PIECES", 2)
    with pytest.raises(InvalidArgument, match="in 2 pieces"):
        render(SIMPLE, HELLO)


def test_model_without_a_template_says_so(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path, {})
    assert template.source is None
    with pytest.raises(InvalidArgument, match="this model has no chat template"):
        template.render(HELLO)


def test_template_is_found_in_either_file(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert ChatTemplate.load(tmp_path, {}).render(HELLO) == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path, {}).render(HELLO) == "the default"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert ChatTemplate.load(tmp_path, {}).render(HELLO) == "from its own file"


@pytest.mark.parametrize("value", [3, [], [{"name": "tool_use", "template": "x"}], ["x"]])
def test_template_of_another_shape_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelError, match='one called "default"'):
        ChatTemplate.load(tmp_path, {})


def test_broken_template_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{% for %}")
    with pytest.raises(ModelError, match=r"chat_template.jinja: a Jinja template \(line 2"):
        ChatTemplate.load(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja: readable text"):
        ChatTemplate.load(tmp_path, {})
