"""Settings: defaults < TOML file < environment < flags, frozen once resolved. The only reader of the environment."""

from weir.config.load import load_config
from weir.config.sections import (
    SECTIONS,
    ControllerConfig,
    LimitsConfig,
    NatsConfig,
    RouterConfig,
    TelemetryConfig,
    WorkerConfig,
)

__all__ = [
    "SECTIONS",
    "ControllerConfig",
    "LimitsConfig",
    "NatsConfig",
    "RouterConfig",
    "TelemetryConfig",
    "WorkerConfig",
    "load_config",
]
