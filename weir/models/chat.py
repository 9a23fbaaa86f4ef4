"""A model's own chat template: messages in, prompt text out, exactly as transformers renders it.

The template comes with the model, so it runs in Jinja's immutable sandbox, and its size, its input and its
output are bounded. Messages come from clients; what a template refuses is the client's InvalidArgument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weir.errors import InvalidArgument, ModelError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_MESSAGES = 4096
MAX_CONTENT_CHARS = 8 * 1024 * 1024
MAX_PROMPT_CHARS = 16 * 1024 * 1024
MAX_PROMPT_PIECES = 1_000_000

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED_TEMPLATES = {"chatml": CHATML}
"""Templates that can be asked for by name instead of by file."""

Message = Mapping[str, Any]
"""``role`` and ``content`` (a string or OpenAI's list of parts); other keys reach the template unchanged."""


class ChatTemplate:
    """The chat template of one model, compiled once; immutable and safe to share between threads."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], file: str = "chat_template") -> None:
        """``source`` None: a model without a template. Raises ModelError if it is too long or no Jinja."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled = None if source is None else _compile(source, file)

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Read chat_template.jinja, else ``chat_template`` in tokenizer_config.json (of several, "default").

        ``special_tokens`` are those of ``Tokenizer.special_tokens``: templates spell them by name.
        """
        path = folder / "chat_template.jinja"
        try:
            if path.exists():
                return cls(path.read_text(encoding="utf-8"), special_tokens, str(path))
            path = folder / "tokenizer_config.json"
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise ModelError(file=str(path), tensor=None, expectation=f"readable text ({error})") from error
        source = _default_template(str(path), config.get("chat_template"))
        return cls(source, special_tokens, f"{path}: chat_template")

    @classmethod
    def given(cls, name_or_file: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """A template named in NAMED_TEMPLATES, or read from a file; used instead of the model's own."""
        if name_or_file in NAMED_TEMPLATES:
            return cls(NAMED_TEMPLATES[name_or_file], special_tokens, name_or_file)
        try:
            return cls(Path(name_or_file).read_text(encoding="utf-8"), special_tokens, name_or_file)
        except (OSError, ValueError) as error:
            known = ", ".join(sorted(NAMED_TEMPLATES))
            raise InvalidArgument("chat_template", name_or_file, f"a readable file, or one of: {known}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        date: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``; tokenize it without adding special tokens.

        ``date`` is today in ISO 8601 for templates that print it; without it they use their own default.
        ``variables`` are further names that the template may read (``tools``, ``enable_thinking``).
        Raises InvalidArgument, which names the message, when the model has no template, a message is
        malformed, a bound is exceeded, or the template refuses the conversation.
        """
        if self._compiled is None:
            limit = "this model has no chat template; send a plain prompt instead"
            raise InvalidArgument(field="messages", value=f"{len(messages)} messages", limit=limit)
        names: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
        }
        names["messages"] = _checked_messages(messages)
        names["add_generation_prompt"] = add_generation_prompt
        if date is not None:
            names["strftime_now"] = datetime.fromisoformat(date).strftime
        try:
            return _bounded(self._compiled, names)
        except InvalidArgument:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            limit = f"the model's chat template refuses them: {error}"
            raise InvalidArgument(field="messages", value=f"{len(messages)} messages", limit=limit) from error


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; here its body is simply kept."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, file: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        expectation = f"at most {MAX_TEMPLATE_CHARS} characters, got {len(source)}"
        raise ModelError(file=file, tensor=None, expectation=expectation)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        expectation = f"a Jinja template (line {error.lineno}: {error.message})"
        raise ModelError(file=file, tensor=None, expectation=expectation) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _default_template(file: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    entries = value if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    source = named.get("default")
    if not isinstance(source, str):
        expectation = 'a string, or a list of named templates with one called "default"'
        raise ModelError(file=file, tensor="chat_template", expectation=expectation)
    return source


def _bounded(template: jinja2.Template, names: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(names):
        size += len(piece)
        if size > MAX_PROMPT_CHARS or len(pieces) >= MAX_PROMPT_PIECES:
            limit = f"must render to at most {MAX_PROMPT_CHARS} characters in {MAX_PROMPT_PIECES} pieces"
            raise InvalidArgument(field="messages", value=f"{size} characters", limit=limit)
        pieces.append(piece)
    return "".join(pieces)


def _checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of ``messages`` with plain string contents."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        limit = f"must hold 1 to {MAX_MESSAGES} messages"
        raise InvalidArgument(field="messages", value=f"{len(messages)} messages", limit=limit)
    checked = [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    size = sum(len(message["content"] or "") for message in checked)
    if size > MAX_CONTENT_CHARS:
        limit = f"must hold at most {MAX_CONTENT_CHARS} characters together"
        raise InvalidArgument(field="messages", value=f"{size} characters", limit=limit)
    return checked


def _checked_message(field: str, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgument(field=field, value=message, limit="must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgument(field=f"{field}.role", value=role, limit="must be a non-empty string")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidArgument(field=f"{field}.content", value=None, limit="must be a string or a list of text parts")
    return {**message, "content": None if content is None else content_text(f"{field}.content", content)}


def content_text(field: str, content: object) -> str:
    """The text of a message's content: itself, or its text parts joined by newlines.

    Raises InvalidArgument, naming the part, for a part of any type but ``text``.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidArgument(field=field, value=content, limit="must be a string or a list of text parts")
    return "\n".join([_part_text(f"{field}[{i}]", part) for i, part in enumerate(content)])


def _part_text(field: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise InvalidArgument(field=field, value=part, limit="must be an object with type and text")
    if part.get("type") != "text":
        limit = 'only parts of type "text" are supported'
        raise InvalidArgument(field=f"{field}.type", value=part.get("type"), limit=limit)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgument(field=f"{field}.text", value=text, limit="must be a string")
    return text
