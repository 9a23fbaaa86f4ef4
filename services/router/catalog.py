"""Models that can be asked for: tokenizer, chat template and limits by name. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weir.errors import InvalidArgument, Unavailable
from weir.models.chat import ChatTemplate
from weir.models.config import load_config
from weir.models.tokenizer import Tokenizer
from weir.services.router.answer import ModelInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router knows of a model. ``vocab_size`` is the model's, padding included."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    context_tokens: int
    architecture: str
    vocab_size: int
    created_unix_s: int


def load_model(name: str, folder: Path, created_unix_s: float, chat_template: str = "") -> ServedModel:
    """Read a model folder; the name is the folder's when empty. Raises ModelError.

    ``chat_template`` replaces the model's own (see ChatTemplate.given); InvalidArgument when it cannot be read.
    """
    config = load_config(folder)
    tokenizer = Tokenizer.load(folder)
    return ServedModel(
        name=name or folder.resolve().name,
        tokenizer=tokenizer,
        template=(
            ChatTemplate.given(chat_template, tokenizer.special_tokens)
            if chat_template
            else ChatTemplate.load(folder, tokenizer.special_tokens)
        ),
        context_tokens=config.max_position,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        created_unix_s=int(created_unix_s),
    )


class Catalog:
    """Models by name. ``token_limits`` gives what the workers of a model can hold, 0 when unknown."""

    def __init__(self, token_limits: Callable[[str], int]) -> None:
        self._models: dict[str, ServedModel] = {}
        self._token_limits = token_limits

    def add(self, model: ServedModel) -> None:
        """Serve ``model``; replaces one of the same name."""
        self._models[model.name] = model

    def remove(self, name: str) -> None:
        """Serve it no more."""
        self._models.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether ``name`` is known."""
        return name in self._models

    def find(self, name: str) -> ServedModel:
        """The model called ``name``; empty means the only one. Raises InvalidArgument or Unavailable."""
        if not self._models:
            raise Unavailable("no model is served yet: no worker has registered and none was named at start")
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(name)
        if model is None:
            raise InvalidArgument("model", name, f"must be one of: {', '.join(sorted(self._models))}")
        return model

    def token_limit(self, model: ServedModel) -> int:
        """Most tokens, prompt plus output, that a request to ``model`` may have now."""
        limit = self._token_limits(model.name)
        return min(model.context_tokens, limit) if limit else model.context_tokens

    def models(self) -> list[ModelInfo]:
        """All models, by name."""
        return [
            ModelInfo(m.name, self.token_limit(m), m.architecture, m.created_unix_s)
            for _, m in sorted(self._models.items())
        ]
