"""Where settings come from, which are refused, and how."""

import dataclasses
from pathlib import Path

import pytest

from weir.config import SECTIONS, LimitsConfig, NatsConfig, RouterConfig, WorkerConfig, load_config
from weir.config.flags import parse_command_line
from weir.config.listing import list_settings, settings_markdown
from weir.errors import InvalidArgument, NotFound
from weir.lifecycle import Role
from weir.rpc.limits import RpcLimits


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "weir.toml"
    path.write_text(text)
    return path


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path, "[worker]\nmax_running = 2\nmax_waiting = 3\nthreads = 4\n[router]\nbind = 'a:1'\n")
    environ = {"WEIR_WORKER_MAX_WAITING": "5", "WEIR_WORKER_THREADS": "6", "WEIR_ROUTER_BIND": "b:2", "HOME": "/"}
    flags: dict[str, object] = {"threads": 7, "role": None}
    config = load_config(WorkerConfig, section="worker", toml_path=path, environ=environ, flags=flags)
    assert (config.max_running, config.max_waiting, config.threads, config.role) == (2, 5, 7, Role.MIXED)
    assert config.block_size == WorkerConfig().block_size


def test_the_result_is_frozen() -> None:
    config = load_config(NatsConfig, section="nats", environ={})
    assert config == NatsConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.url = "x"  # type: ignore[misc]


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_NATS_URL", " nats://elsewhere:1 ")
    assert load_config(NatsConfig, section="nats").url == "nats://elsewhere:1"


@pytest.mark.parametrize(
    ("field", "raw", "value"),
    [
        ("role", "Decode", Role.DECODE),
        ("role", Role.PREFILL, Role.PREFILL),
        ("cpus", "0-2,5", (0, 1, 2, 5)),
        ("cpus", [1, 3], (1, 3)),
        ("cpus", "", ()),
        ("checksums", "off", False),
        ("checksums", True, True),
        ("lease_s", "2.5", 2.5),
        ("lease_s", 3, 3.0),
        ("threads", "2", 2),
        ("bind", "[::1]:80", "[::1]:80"),
        ("advertise", "", ""),
    ],
)
def test_values_are_read(field: str, raw: object, value: object) -> None:
    config = load_config(WorkerConfig, section="worker", flags={field: raw}, environ={})
    assert getattr(config, field) == value


@pytest.mark.parametrize(
    ("field", "raw", "limit"),
    [
        ("role", "boss", "must be one of prefill, decode, mixed"),
        ("cpus", "3-1", "ranges go up and hold at most 4096 numbers"),
        ("cpus", "a", "must be a whole number"),
        ("checksums", "maybe", "must be true or false"),
        ("lease_s", "soon", "must be a number"),
        ("lease_s", "nan", "must be a finite number"),
        ("lease_s", "0", "must lie in [0.1, 3600]"),
        ("threads", "2.5", "must be a whole number"),
        ("threads", True, "must be a whole number"),
        ("threads", -1, "must lie in [0, 1024]"),
        ("dtype", "int4", "must be one of auto, float32, bfloat16, float16"),
        ("bind", "localhost", "must be host:port"),
        ("bind", "h:70000", "port must lie in [0, 65535]"),
        ("model_path", 3, "must be a text"),
    ],
)
def test_bad_values_name_key_value_limit_and_origin(field: str, raw: object, limit: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_config(WorkerConfig, section="worker", flags={field: raw}, environ={})
    error = caught.value
    assert (error.field, error.value) == (f"worker.{field}", raw)
    assert error.limit == f"{limit} (from --{field.replace('_', '-')})"


def test_unknown_keys_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"worker\.max_runing.*did you mean 'max_running'"):
        load_config(WorkerConfig, section="worker", toml_path=write(tmp_path, "[worker]\nmax_runing=1\n"), environ={})
    with pytest.raises(InvalidArgument, match=r"WEIR_NATS_URI.*did you mean 'url'"):
        load_config(NatsConfig, section="nats", environ={"WEIR_NATS_URI": "x"})
    with pytest.raises(InvalidArgument, match="did you mean 'worker'"):
        load_config(WorkerConfig, section="worker", toml_path=write(tmp_path, "[workers]\n"), environ={})
    with pytest.raises(InvalidArgument, match="unknown setting; known: url"):
        load_config(NatsConfig, section="nats", flags={"zzz": 1}, environ={})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"absent\.toml"):
        load_config(NatsConfig, section="nats", toml_path=tmp_path / "absent.toml", environ={})
    with pytest.raises(InvalidArgument, match="not valid TOML"):
        load_config(NatsConfig, section="nats", toml_path=write(tmp_path, "[nats"), environ={})
    with pytest.raises(InvalidArgument, match="must be a table"):
        load_config(NatsConfig, section="nats", toml_path=write(tmp_path, "nats = 1"), environ={})


def test_kubernetes_service_links_are_no_settings() -> None:
    environ = {
        "WEIR_ROUTER_SERVICE_HOST": "10.0.0.1",
        "WEIR_ROUTER_SERVICE_PORT": "7400",
        "WEIR_ROUTER_SERVICE_PORT_GRPC": "7400",
        "WEIR_ROUTER_PORT": "tcp://10.0.0.1:7400",
        "WEIR_ROUTER_PORT_7400_TCP_ADDR": "10.0.0.1",
        "WEIR_ROUTER_MAX_ATTEMPTS": "4",
    }
    assert load_config(RouterConfig, section="router", environ=environ).max_attempts == 4


def test_command_line_fills_its_sections() -> None:
    given = parse_command_line(
        ["--nats", "nats://x:1", "--nats-registry-ttl-s=2", "--bind", "h:1", "--no-reflection", "--log-level", "debug"],
        prog="p",
        section="router",
    )
    assert given.config_path is None
    assert given.flags == {
        "nats": {"url": "nats://x:1", "registry_ttl_s": "2"},
        "router": {"bind": "h:1", "reflection": False},
        "telemetry": {"log_level": "debug"},
    }
    assert given.load(RouterConfig, "router", environ={}) == RouterConfig(bind="h:1", reflection=False)
    assert given.load(NatsConfig, "nats", environ={}).registry_ttl_s == 2.0


def test_command_line_refuses_unknown_flags_and_explains_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgument, match="did you mean --bind"):
        parse_command_line(["--bnd", "h:1"], prog="p", section="router")
    for section in SECTIONS:
        with pytest.raises(SystemExit) as caught:
            parse_command_line(["--help"], prog="p", section=section, example="p --bind h:1")
        assert caught.value.code == 0
        assert "example: p --bind h:1" in capsys.readouterr().out


def test_every_setting_is_listed_once_and_defaults_keep_their_limits() -> None:
    rows = list_settings()
    assert len(rows) == sum(len(dataclasses.fields(cls)) for cls in SECTIONS.values())
    assert len({row.variable for row in rows}) == len(rows)
    assert settings_markdown().count("\n") == len(rows) + 2
    for section, cls in SECTIONS.items():
        defaults = {field.name: getattr(cls(), field.name) for field in dataclasses.fields(cls)}
        assert load_config(cls, section=section, flags=defaults, environ={}) == cls()


def test_rpc_limits_have_the_same_defaults() -> None:
    assert RpcLimits.of(LimitsConfig()) == RpcLimits()
