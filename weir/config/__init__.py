"""Settings: defaults < TOML file < environment < flags, then frozen. Only here is the environment read."""

from weir.config.load import load_config
from weir.config.sections import (
    SECTIONS,
    ControllerConfig,
    LimitsConfig,
    NatsConfig,
    RouterConfig,
    SecurityConfig,
    TelemetryConfig,
    WorkerConfig,
)

__all__ = [
    "SECTIONS",
    "ControllerConfig",
    "LimitsConfig",
    "NatsConfig",
    "RouterConfig",
    "SecurityConfig",
    "TelemetryConfig",
    "WorkerConfig",
    "load_config",
]
