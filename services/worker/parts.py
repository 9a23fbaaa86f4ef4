"""What a worker is made of: model, pool and engine, built from the configuration before anything is served."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from weir.balance.profile import Profile
from weir.clock import Clock
from weir.config import WorkerConfig
from weir.engine.engine import Engine, EngineConfig, Runner
from weir.engine.request import EngineRequest, Mode
from weir.engine.runner import ModelRunner
from weir.engine.sampler import Sampler
from weir.engine.sampling import SamplingParams
from weir.engine.scheduler import SchedulerConfig
from weir.errors import InternalError, InvalidArgument
from weir.ids import RequestKey
from weir.kvcache.blocks import BlockManager
from weir.kvcache.layout import LAYOUT_VERSION, KvLayout
from weir.kvcache.pool import KvPool
from weir.kvcache.prefix import PrefixIndex
from weir.models.build import load_model, model_fingerprint_fields
from weir.models.convert import convert_gguf, file_digest
from weir.models.llama import Model
from weir.models.memory import keep_freed_memory
from weir.models.tokenizer import Tokenizer
from weir.transfer.fingerprint import Fingerprint

CPU_BLOCK_SIZE = 16
GPU_BLOCK_SIZE = 64
WARM_UP_TOKENS = 8
MAX_WARM_UP_STEPS = 100

WrapRunner = Callable[[Runner], Runner]


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """All that the services need of the model and its memory."""

    engine: Engine
    runner: Runner
    blocks: BlockManager
    pool: KvPool
    fingerprint: Fingerprint
    eos_token_ids: frozenset[int]
    vocab_size: int
    context_tokens: int
    model_name: str
    model_path: str
    profile: Profile | None = None


def build_parts(config: WorkerConfig, clock: Clock) -> WorkerParts:
    """Load the model and allocate its KV memory. Raises ModelError or InvalidArgument with what is wrong."""
    folder = model_folder(config.model_path)
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, dtype=_dtype_name(config), device=config.device)
    keep_freed_memory()
    block_size = config.block_size or (CPU_BLOCK_SIZE if config.device == "cpu" else GPU_BLOCK_SIZE)
    layout = KvLayout(
        layers=model.config.num_layers,
        kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=block_size,
        dtype_bytes=model.dtype.itemsize,
    )
    checksums = config.checksums and config.device == "cpu"
    pool = KvPool(layout, num_blocks(config, layout), model.dtype, config.device, checksums=checksums)
    fingerprint = fingerprint_of(model, tokenizer.digest(), block_size)
    context = min(config.context_tokens or model.config.max_position, model.config.max_position)
    eos = tokenizer.eos_token_ids | frozenset(model.config.eos_token_ids)
    return assemble(
        config,
        clock,
        runner=ModelRunner(model, pool.data),
        pool=pool,
        fingerprint=fingerprint,
        vocab_size=model.config.vocab_size,
        context_tokens=context,
        eos_token_ids=eos,
        model_name=config.model_name or folder.name,
        model_path=str(folder),
    )


def assemble(
    config: WorkerConfig,
    clock: Clock,
    *,
    runner: Runner,
    pool: KvPool,
    fingerprint: Fingerprint,
    vocab_size: int,
    context_tokens: int,
    eos_token_ids: frozenset[int],
    model_name: str,
    model_path: str,
) -> WorkerParts:
    """The engine around ``runner`` and ``pool``."""
    if config.max_running > config.max_batch_tokens:
        raise InvalidArgument(
            "worker.max_running", config.max_running, f"at most max_batch_tokens = {config.max_batch_tokens}"
        )
    prefix = PrefixIndex() if config.prefix_cache else None
    blocks = BlockManager(pool.num_blocks, pool.layout.block_size, pool.guard, prefix)
    scheduler = SchedulerConfig(
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_waiting=max(1, config.max_waiting),
        fingerprint_digest=fingerprint.digest(),
    )
    engine_config = EngineConfig(vocab_size=vocab_size, max_context_tokens=context_tokens, scheduler=scheduler)
    engine = Engine(runner, Sampler(), blocks, pool.seal, engine_config, clock)
    return WorkerParts(
        engine=engine,
        runner=runner,
        blocks=blocks,
        pool=pool,
        fingerprint=fingerprint,
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        model_name=model_name,
        model_path=model_path,
    )


def warm_up(parts: WorkerParts) -> None:
    """One tiny prefill and some decode steps, so that first use is not slow. Leaves the pool as it was.

    Raises InternalError when the model cannot run. To be called before the step thread starts.
    """
    length = min(WARM_UP_TOKENS, parts.blocks.block_size // 2, parts.context_tokens - 2)
    if length < 1:
        return
    request = EngineRequest(
        key=RequestKey("warm-up", 1),
        prompt=(0,) * length,
        generated=(),
        sampling=SamplingParams(max_tokens=min(3, parts.context_tokens - length), temperature=0.0, ignore_eos=True),
        mode=Mode.LOCAL,
        tenant_salt=b"warm-up",
    )
    parts.engine.add(request)
    for _ in range(MAX_WARM_UP_STEPS):
        if not parts.engine.has_work():
            break
        parts.engine.step()
    if parts.engine.failed_steps:
        raise InternalError("the model failed in its warm-up; see the log")


def model_folder(path: str) -> Path:
    """The Hugging Face folder for ``path``; a GGUF file is converted once, into the user's cache."""
    if not path:
        raise InvalidArgument("worker.model_path", path, "must name a model folder or a GGUF file")
    given = Path(path)
    if given.is_file() and given.suffix == ".gguf":
        cache = Path.home() / ".cache" / "weir" / "models"
        return convert_gguf(given, cache / f"{given.stem.lower()}-{file_digest(given)}")
    return given


def num_blocks(config: WorkerConfig, layout: KvLayout) -> int:
    """Blocks of the pool; InvalidArgument when the memory given does not hold one."""
    count = config.num_blocks or (config.kv_memory_mb << 20) // layout.block_bytes
    if count < 1:
        limit = f"a block of this model takes {layout.block_bytes} bytes"
        raise InvalidArgument("worker.kv_memory_mb", config.kv_memory_mb, limit)
    return count


def fingerprint_of(model: Model, tokenizer_digest: str, block_size: int) -> Fingerprint:
    """What KV of this model in this layout means."""
    fields = model_fingerprint_fields(model)
    return Fingerprint(
        weights=str(fields["weights"]),
        architecture=str(fields["architecture"]),
        dtype=str(fields["dtype"]),
        kv_dtype=str(fields["kv_dtype"]),
        layers=int(fields["layers"]),
        kv_heads=int(fields["kv_heads"]),
        head_dim=int(fields["head_dim"]),
        block_size=block_size,
        layout_version=LAYOUT_VERSION,
        tokenizer=tokenizer_digest,
        adapter="",
        rope=str(fields["rope"]),
    )


def set_threads(config: WorkerConfig) -> None:
    """Let torch compute with the threads that the configuration gives."""
    threads = config.threads or len(config.cpus)
    if threads:
        torch.set_num_threads(threads)


def _dtype_name(config: WorkerConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if config.device == "cpu" else "bfloat16"
