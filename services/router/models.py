"""Gets to know the models that workers serve: reads their folders, off the event loop, once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from weir.errors import ModelError
from weir.rpc.v1 import events_pb2
from weir.services.router.catalog import Catalog, ServedModel, load_model

_log = logging.getLogger(__name__)

MAX_MODELS = 64


class ModelLoader:
    """``given`` is the model named at start, if any; it stands in for workers' models with the same tokenizer."""

    def __init__(self, catalog: Catalog, executor: Executor, on_loaded: Callable[[], None]) -> None:
        self._catalog = catalog
        self._executor = executor
        self._on_loaded = on_loaded
        self._given: ServedModel | None = None
        self._named = True
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._failed: set[tuple[str, str]] = set()

    async def load(self, folder: Path, name: str, now_unix_s: float, chat_template: str = "") -> None:
        """Read the model named at start; without a name it goes by its folder's, then by its workers'."""
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(self._executor, load_model, name, folder, now_unix_s, chat_template)
        self._given = model
        self._named = bool(name)
        self._catalog.add(model)

    def learn(self, record: events_pb2.WorkerRecord, now_unix_s: float) -> None:
        """A worker serves ``record.model``: make sure that it can be asked for."""
        name = record.model
        if not name or self._catalog.has(name) or name in self._loading:
            return
        given = self._given
        if given is not None and given.tokenizer.digest() == record.fingerprint.tokenizer:
            if not self._named:
                self._catalog.remove(given.name)
                self._named = True
            self._catalog.add(replace(given, name=name))
            return
        path = record.model_path
        if not path or (name, path) in self._failed or len(self._catalog.models()) >= MAX_MODELS:
            return
        task = asyncio.get_running_loop().create_task(self._read(name, Path(path), now_unix_s))
        self._loading[name] = task

    async def close(self) -> None:
        """Stop loading."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, name: str, folder: Path, now_unix_s: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            model = await loop.run_in_executor(self._executor, load_model, name, folder, now_unix_s)
        except ModelError as error:
            self._failed.add((name, str(folder)))
            _log.error("model %s cannot be served: %s", name, error)
        else:
            self._catalog.add(model)
            _log.info("serving model %s from %s", name, folder)
            self._on_loaded()
        finally:
            del self._loading[name]
