"""Whether the network carries the KV: bytes per token, flow against links, what is held twice."""

from __future__ import annotations

from dataclasses import dataclass

from weir.balance.capacity import not_negative, positive
from weir.errors import InvalidArgument


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, bytes_per_value: int, tp: int = 1) -> int:
    """2 * layers * kv_heads * head_dim * bytes, times max(1, TP / kv_heads) when shipped rank by rank (MHA, GQA)."""
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim), ("tp", tp)):
        positive(name, value)
    if tp > kv_heads and tp % kv_heads:
        raise InvalidArgument("tp", tp, f"must be a multiple of kv_heads = {kv_heads} when larger")
    return 2 * layers * kv_heads * head_dim * bytes_per_value * max(1, tp // kv_heads)


def mla_bytes_per_token(*, layers: int, latent: int, rope: int, bytes_per_value: int) -> int:
    """layers * (latent + rope) * bytes: multi-head latent attention."""
    return layers * (latent + rope) * bytes_per_value


def roofline_prefill_tokens_per_s(*, flops_per_s: float, active_parameters: float) -> float:
    """r_P <= F / (2 * N_active): an upper bound, right for the fabric check, wrong for sizing."""
    return positive("flops_per_s", flops_per_s) / (2 * positive("active_parameters", active_parameters))


@dataclass(frozen=True, slots=True)
class FabricCheck:
    """Flow and limits in bytes/s; ``binding`` names the tightest limit."""

    flow: float
    limit: float
    binding: str

    @property
    def holds(self) -> bool:
        """Whether the network carries the flow."""
        return self.flow <= self.limit

    @property
    def utilisation(self) -> float:
        """Flow over the tightest limit."""
        return self.flow / self.limit


def check_fabric(
    *,
    prefill_workers: float,
    prefill_tokens_per_s: float,
    bytes_per_token: float,
    prefill_link: float,
    decode_workers: float,
    decode_link: float,
    fabric: float = float("inf"),
    shipped_hit_ratio: float = 0.0,
) -> FabricCheck:
    """n_P r_P kappa <= min(m_P BW_P, m_D BW_D, BW_fabric), times 1 / (1 - h) if cached prefixes are shipped too.

    Links are bytes/s per worker. The decode side's ingress binds first when it has few workers.
    """
    if not 0 <= shipped_hit_ratio < 1:
        raise InvalidArgument("shipped_hit_ratio", shipped_hit_ratio, "must lie in [0, 1)")
    flow = prefill_workers * prefill_tokens_per_s * bytes_per_token / (1 - shipped_hit_ratio)
    limits = {
        "prefill egress": prefill_workers * positive("prefill_link", prefill_link),
        "decode ingress": decode_workers * positive("decode_link", decode_link),
        "fabric": fabric,
    }
    binding = min(limits, key=lambda name: limits[name])
    return FabricCheck(not_negative("flow", flow), limits[binding], binding)


def transfer_s(*, num_bytes: float, link: float, latency_s: float = 0.0) -> float:
    """latency + bytes / bandwidth."""
    return latency_s + not_negative("num_bytes", num_bytes) / positive("link", link)


def duplicated_bytes(*, produced_bytes_per_s: float, window_s: float) -> float:
    """Little's law: bytes held on both sides = P * T_window, window from first block on both sides to release."""
    return not_negative("produced_bytes_per_s", produced_bytes_per_s) * not_negative("window_s", window_s)


def chunked_rereads(chunks: int) -> float:
    """N chunks read the earlier KV (N - 1) / 2 extra full-prompt times."""
    return (positive("chunks", chunks) - 1) / 2
