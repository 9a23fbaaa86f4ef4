"""Whether a resize lands before the stock of finished KV hits an end.

Stock Q0 of capacity C changes by delta = P - A (produced minus admitted, bytes/s); a resize takes tau seconds.
"""

from __future__ import annotations

import math

from weir.balance.capacity import not_negative, positive


def time_to_end_s(*, delta: float, stock: float, capacity: float) -> float:
    """Seconds until the stock is full (delta > 0) or empty (delta < 0); infinite when it stands still."""
    not_negative("stock", stock)
    not_negative("capacity - stock", capacity - stock)
    if delta > 0:
        return (capacity - stock) / delta
    if delta < 0:
        return stock / -delta
    return math.inf


def rides_out(*, delta: float, stock: float, capacity: float, tau_s: float) -> bool:
    """tau <= (C - Q0) / delta for delta > 0, tau <= Q0 / -delta for delta < 0; the edge survives."""
    return not_negative("tau_s", tau_s) <= time_to_end_s(delta=delta, stock=stock, capacity=capacity) * (1 + 1e-12)


def stranded_flow(*, delta: float, stock: float, capacity: float, tau_s: float) -> float:
    """max(0, -delta - Q0/tau, delta - (C - Q0)/tau): average flow that finds no KV, or no room, until tau."""
    positive("tau_s", tau_s)
    return max(0.0, -delta - stock / tau_s, delta - (capacity - stock) / tau_s)


def stock_delay_s(*, stock: float, admitted_per_s: float) -> float:
    """Q0 / A: how long the stock delays every request."""
    return not_negative("stock", stock) / positive("admitted_per_s", admitted_per_s)


def max_stock(*, admitted_per_s: float, ttft_slack_s: float) -> float:
    """Q0 <= A * slack: the largest stock that the TTFT allows."""
    return not_negative("admitted_per_s", admitted_per_s) * not_negative("ttft_slack_s", ttft_slack_s)


def survivable_shortfall(*, ttft_slack_s: float, tau_s: float) -> float:
    """The largest shortfall fraction f with tau <= slack / f, at most 1: why flips are in place."""
    return min(1.0, not_negative("ttft_slack_s", ttft_slack_s) / positive("tau_s", tau_s))
