"""One simulated request: lengths and moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir.services.router.policy import Demand
    from weir.simulate.worker import Worker

NEVER_S = -1.0


class Request:
    """Mutable; moments are NEVER_S until they come.

    ``context``   tokens whose KV it has or needs before the next token: the prompt, later what was generated as well
    ``computed``  of ``context``, tokens whose KV is there while it prefills
    ``left``      output tokens still to come
    ``ready``     the present attempt's prefill is done
    ``source``    where its KV waits or is made; ``target`` who decodes it, both at the present attempt
    """

    __slots__ = (
        "arrival_s",
        "attempt",
        "cached",
        "computed",
        "context",
        "demand",
        "first_s",
        "joined_step",
        "left",
        "local",
        "name",
        "output",
        "prompt",
        "ready",
        "source",
        "target",
    )

    def __init__(self, name: str, arrival_s: float, prompt: int, output: int, cached: int = 0) -> None:
        self.name = name
        self.arrival_s = arrival_s
        self.prompt = prompt
        self.output = output
        self.cached = cached
        self.attempt = 0
        self.context = prompt
        self.computed = 0
        self.left = output
        self.first_s = NEVER_S
        self.joined_step = 0
        self.local = False
        self.ready = False
        self.source: Worker | None = None
        self.target: Worker | None = None
        self.demand: Demand | None = None
