"""One request in the book. Pure data; ``RequestBook`` alone changes it."""

from __future__ import annotations

from typing import Any

from weir.ids import WorkerKey
from weir.lifecycle import RequestState
from weir.services.router.commands import Admission
from weir.services.router.journal import Journal
from weir.services.router.policy import Demand
from weir.services.router.prefixes import PromptKeys
from weir.services.router.story import Story
from weir.services.router.timings import Stamps

NEVER_S = float("inf")


class Entry:
    """A request under way.

    Who holds what: ``prefill`` is set while a worker computes the prompt or keeps its KV under a lease for
    this attempt, ``decode`` while one reads, waits or decodes. Whoever clears one of them has sent a cancel or
    a release there, or knows that nothing is left there. An entry is in exactly one of three places: waiting
    for a worker (``waiting``), backing off (``retry_s`` set), or dispatched.
    """

    __slots__ = (
        "admission",
        "attempt",
        "avoid",
        "cached_tokens",
        "decode",
        "decode_name",
        "dropped",
        "expected_tokens",
        "failures",
        "final_ticket",
        "first_token",
        "generated",
        "journal",
        "keys",
        "kv_read",
        "lease_id",
        "local",
        "local_hit_tokens",
        "order",
        "path",
        "patience_s",
        "prefill",
        "prefill_cached_tokens",
        "prefill_name",
        "prefill_started",
        "read_done",
        "read_until_s",
        "released",
        "resumed_tokens",
        "retry_s",
        "revision",
        "stamps",
        "state",
        "stays",
        "story",
        "tickets",
        "too_small",
        "transferring_s",
        "void_reads",
        "waiting",
    )

    def __init__(self, admission: Admission, now_s: float, patience_s: float, expected_tokens: int = 0) -> None:
        self.admission = admission
        self.keys = PromptKeys(admission.prompt, admission.tenant_salt)
        self.expected_tokens = expected_tokens
        """Length of the answer by what is known of others; 0 is not known."""
        self.state = RequestState.RECEIVED
        self.stamps = Stamps(received_s=admission.received_s, admitted_s=now_s)
        self.journal = Journal()
        self.generated: list[int] = []
        """Tokens passed on to the consumer."""
        self.revision = ""
        """Of the model that made the first of them: the others are made by no other."""
        self.attempt = 0
        self.failures = 0
        """Attempts that failed; those that were only refused for lack of room do not count."""
        self.avoid: frozenset[WorkerKey] = frozenset()
        self.too_small: frozenset[WorkerKey] = frozenset()
        """Workers that can never hold it, by their own word."""
        self.stays = False
        """Its KV did not get from any prefill worker to one that decodes: the next attempt moves none."""
        self.story = Story()
        """Why it is not done yet."""
        self.waiting = False
        self.order = 0
        """Place in the queue for workers; kept when it has to queue again."""
        self.retry_s = NEVER_S
        self.patience_s = patience_s
        """When to give up waiting for a worker."""
        self.path = ""
        """How its first token came: ``disaggregated``, ``local`` (prefilled on a decode worker), ``mixed``."""
        self.prefill_name = ""
        self.decode_name = ""
        self.cached_tokens = 0
        self.kv_read: Any | None = None
        self.prefill: WorkerKey | None = None
        self.decode: WorkerKey | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the attempt; both legs must be gone."""
        assert self.prefill is None, "a prefill leg would be forgotten"
        assert self.decode is None, "a decode leg would be forgotten"
        self.local = False
        self.prefill_started = False
        self.lease_id = 0
        self.tickets: list[Any] = []
        self.final_ticket = False
        self.first_token: Any | None = None
        self.read_done = False
        self.released = False
        self.void_reads = 0
        self.dropped: frozenset[WorkerKey] = frozenset()
        """Decode workers that were told to stop this attempt: bound to one of them again, it is stopped at once."""
        self.read_until_s = NEVER_S
        self.transferring_s = NEVER_S
        """Since when D has had all that it needs to read."""
        self.resumed_tokens = len(self.generated)
        self.prefill_cached_tokens = 0
        self.local_hit_tokens = 0

    def take_path(self, path: str) -> None:
        """It is placed; only what brings the first token counts."""
        if not self.generated:
            self.path = path

    @property
    def request_id(self) -> str:
        """Identity."""
        return self.admission.request_id

    @property
    def demand(self) -> Demand:
        """What is left to be placed."""
        done, admission = len(self.generated), self.admission
        left = admission.sampling.max_tokens - done
        return Demand(
            prompt_tokens=len(admission.prompt) + done,
            max_tokens=left,
            avoid=self.avoid,
            expected_tokens=min(max(self.expected_tokens - done, done // 2, 1), left) if self.expected_tokens else 0,
            slo_ttft_ms=NEVER_S if done else admission.slo_ttft_ms or NEVER_S,
            slo_tpot_ms=admission.slo_tpot_ms or NEVER_S,
            received_s=admission.received_s,
            keys=self.keys,
            too_small=self.too_small,
            revision=self.revision,
            stays=self.stays,
        )

    @property
    def awaits_decode(self) -> bool:
        """Whether its prefill runs, or is done, and no decode worker is bound."""
        return self.prefill_started and self.prefill is not None and self.decode is None

    @property
    def idles_prefilled(self) -> bool:
        """Whether its prefill is done and nobody reads the KV."""
        return self.awaits_decode and self.first_token is not None

    @property
    def next_due_s(self) -> float:
        """When time alone changes something."""
        due = min(self.admission.deadline_s, self.retry_s, self.read_until_s)
        if self.waiting or self.idles_prefilled:
            due = min(due, self.patience_s)
        return due
