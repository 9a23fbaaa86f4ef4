"""The workers as the router knows them: who, where, how loaded, and what was sent since they last said so. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.balance.profile import Profile
from weir.ids import WorkerKey
from weir.lifecycle import Role
from weir.services.router.advice import Counsel
from weir.services.router.health import Breaker
from weir.services.router.roster import Group, Roster
from weir.services.router.speed import WorkerSpeed

if TYPE_CHECKING:
    from weir.services.router.policy import Demand

REPORT_LAG_S = 0.05
"""A load report may have been made this long before it arrives: work sent later is not yet in it."""
MAX_NOTED = 4096
BUSY_TOKENS = 512
"""With so many pending a worker computes full chunks: the rate that it reports says how fast it is."""
_INF = float("inf")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker's registry entry says. ``fingerprint`` is its digest; sizes are 0 when unknown."""

    key: WorkerKey
    role: Role
    role_epoch: int
    address: str
    draining: bool
    model: str
    fingerprint: bytes
    block_size: int
    num_blocks: int
    context_tokens: int
    model_path: str = ""
    max_running: int = 0
    kv_bytes_per_token: float = 0.0
    heartbeat_s: float = 0.0
    profile: Profile | None = None
    revision: str = ""
    """Equal where the same tokens are answered the same: weights, types and settings of the model."""

    @property
    def pool_tokens(self) -> float:
        """Tokens whose KV its pool holds; inf when it is not known."""
        return self.num_blocks * self.block_size or _INF

    @property
    def request_tokens(self) -> float:
        """Most tokens, prompt plus output, of a request that it could take; inf when it is not known.

        The last token generated needs no KV. Where it only prefills, the output takes none of its pool.
        """
        context = self.context_tokens or _INF
        return context if self.role is Role.PREFILL else min(context, self.pool_tokens + 1)

    @property
    def prompt_tokens(self) -> float:
        """Most tokens of a prompt that it could prefill for another worker; inf when it is not known."""
        return self.pool_tokens if self.role is Role.PREFILL else _INF

    def holds(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether it could take such a request at all, in its role, if nothing else were there."""
        return prompt_tokens <= self.prompt_tokens and prompt_tokens + max_tokens <= self.request_tokens


class Load(NamedTuple):
    """A load report, newest by ``sequence``. ``free_blocks`` counts cached ones, which can be evicted."""

    sequence: int
    running: int
    waiting: int
    pending_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    decode_step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    used_blocks: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    routers: int = 1
    report: Any | None = None
    """The message it came in, for those who show it."""


NO_LOAD = Load(0, 0, 0, 0, 0, 0)


class WorkerView:
    """One worker. Read by policies; changed by ``Fleet`` and by those who hear of it.

    ``bound``: requests of this router that decode there or will, with the TPOT that each was promised (inf: none).
    """

    __slots__ = (
        "_blocks_noted",
        "_bound",
        "_changed",
        "_connected",
        "_decodes_noted",
        "_info",
        "_joining",
        "_limits_ms",
        "_listed",
        "_noted",
        "_tokens_noted",
        "block_size",
        "breaker",
        "context_tokens",
        "expected_tokens",
        "fingerprint",
        "free_blocks",
        "group",
        "heard_s",
        "joining",
        "key",
        "kv_bytes_per_token",
        "last_used",
        "load",
        "load_s",
        "pending_prefill_tokens",
        "refuses_decode_until_s",
        "refuses_prefill_until_s",
        "salt",
        "sequences",
        "speed",
        "tokens_noted",
        "total_blocks",
        "tpot_limit_ms",
        "version",
    )

    def __init__(self, info: WorkerInfo, salt: float = 0.0, changed: Callable[[], None] = lambda: None) -> None:
        self.key = info.key
        """One process lifetime of the worker."""
        self._take(info)
        self._changed = changed
        self._connected = False
        self._listed = True
        self.load = NO_LOAD
        self.load_s = -_INF
        """When the load was reported, on the router's clock."""
        self.heard_s = -_INF
        """When it last said anything."""
        self.last_used = 0
        """Grows with every dispatch in the fleet: the smallest is the least recently used."""
        self.salt = salt
        """Settles what is equal otherwise, in another way in each router."""
        self.speed = WorkerSpeed(info.profile)
        self.breaker = Breaker()
        self.version = 0
        self.group: Group | None = None
        self.refuses_prefill_until_s = 0.0
        self.refuses_decode_until_s = 0.0
        self._noted: dict[str, tuple[float, int, int, int]] = {}
        self._tokens_noted = 0
        self._decodes_noted = 0
        self._blocks_noted = 0
        self._bound: dict[str, tuple[float, int]] = {}
        self._limits_ms: dict[float, int] = {}
        """How many of them were promised each TPOT."""
        self._joining: set[str] = set()
        self.joining = 0
        """Requests of this router that are bound there and do not decode yet."""
        self.expected_tokens = 0
        """Tokens that this router's requests there are expected to generate in all."""
        self.tpot_limit_ms = _INF
        """The tightest TPOT promised to one of them; inf when none was."""
        self._add_up()

    @property
    def info(self) -> WorkerInfo:
        """What its registry entry says."""
        return self._info

    @info.setter
    def info(self, info: WorkerInfo) -> None:
        if info.profile != self._info.profile:
            self.speed.publish(info.profile)
        if info != self._info:
            assert info.key == self.key, "a worker that starts again is another one"
            self._take(info)
            self.touch()
            self._changed()

    def _take(self, info: WorkerInfo) -> None:
        """``info``, and what every quote needs of it at hand."""
        self._info = info
        self.fingerprint = info.fingerprint
        self.block_size = info.block_size
        self.kv_bytes_per_token = info.kv_bytes_per_token

    @property
    def connected(self) -> bool:
        """Whether its sessions are up."""
        return self._connected

    @connected.setter
    def connected(self, connected: bool) -> None:
        if connected != self._connected:
            self._connected = connected
            self._changed()

    @property
    def listed(self) -> bool:
        """Whether it is in the registry."""
        return self._listed

    @listed.setter
    def listed(self, listed: bool) -> None:
        if listed != self._listed:
            self._listed = listed
            self._changed()

    @property
    def usable(self) -> bool:
        """Whether it may be given new work."""
        return self._connected and self._listed and not self._info.draining

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` take there."""
        size = self.block_size
        return -(-tokens // size) if size else 0

    def note(self, request_id: str, now_s: float, tokens: int, decodes: int, blocks: int) -> None:
        """Count work sent until a report can contain it, or until it is over (``settle``)."""
        if len(self._noted) >= MAX_NOTED:
            self.settle(next(iter(self._noted)))
        self._take_back(request_id)
        self._noted[request_id] = (now_s, tokens, decodes, blocks)
        self._tokens_noted += tokens
        self._decodes_noted += decodes
        self._blocks_noted += blocks
        self.touch()

    def settle(self, request_id: str) -> None:
        """The work sent for this request is done, or will not be done."""
        if self._take_back(request_id):
            self.touch()

    def _take_back(self, request_id: str) -> bool:
        noted = self._noted.pop(request_id, None)
        if noted is None:
            return False
        _, tokens, decodes, blocks = noted
        self._tokens_noted -= tokens
        self._decodes_noted -= decodes
        self._blocks_noted -= blocks
        return True

    def take_report(self, load: Load, now_s: float) -> bool:
        """Take a report unless a newer one is known; whether it was taken."""
        if load.sequence <= self.load.sequence:
            return False
        self._learn(self.load, load, now_s)
        self.load = load
        self.load_s = self.heard_s = now_s
        for request_id in self._contained(now_s - REPORT_LAG_S):
            self._take_back(request_id)
        self.touch()
        return True

    def _learn(self, before: Load, load: Load, now_s: float) -> None:
        """Correct the profile by what the report says of work done since the last one."""
        if not before.sequence:
            return
        if load.generated_tokens > before.generated_tokens and load.running and load.decode_step_ms > 0:
            context = load.used_blocks * self._info.block_size
            self.speed.saw_step(load.decode_step_ms, load.running, context, now_s)
        if load.prefilled_tokens > before.prefilled_tokens and before.pending_prefill_tokens >= BUSY_TOKENS:
            self.speed.saw_rate(load.prefill_tokens_per_s, now_s)

    def touch(self) -> None:
        """Its load is another one now."""
        self._add_up()
        self._move()

    def use(self, number: int) -> None:
        """It was given work, as the dispatch of this number in the fleet."""
        self.last_used = number
        self._move()

    def _move(self) -> None:
        """Its place among its group is another one now."""
        self.version += 1
        if self.group is not None:
            self.group.touch(self)

    def _add_up(self) -> None:
        """What was reported and what was sent since, by this router and as much by each other one it serves.

        The others see what this one sees, and do as it does.
        """
        load, info, routers = self.load, self._info, self.load.routers
        self.tokens_noted = self._tokens_noted * routers
        self.pending_prefill_tokens = load.pending_prefill_tokens + self.tokens_noted
        """Prompt tokens it has yet to compute."""
        self.sequences = load.running + load.waiting + self._decodes_noted * routers
        """Sequences it decodes or will."""
        self.total_blocks = load.total_blocks or info.num_blocks
        """Blocks of its pool."""
        self.free_blocks = (load.free_blocks if load.total_blocks else info.num_blocks) - self._blocks_noted
        """Blocks that a new sequence could take, as far as known."""
        self.context_tokens = load.used_blocks * info.block_size
        """Tokens of context there, as reported."""

    def rough_load_ms(self) -> float:
        """How busy it is, to find candidates by; their scores decide."""
        speed = self.speed
        return speed.per_token_ms * self.pending_prefill_tokens + speed.step_base_ms * self.sequences

    def wait_ms(self, now_s: float) -> float:
        """Predicted wait of a new prompt: what was reported, less what it has worked off since, and what was sent."""
        reported, noted = self.load.pending_prefill_tokens, self.tokens_noted
        if not reported and not noted:
            return 0.0
        each = self.speed.queue_ms(1, now_s)
        wait = 0.0
        if reported:
            wait = max(0.0, each * reported - max(0.0, now_s - self.load_s) * 1e3)
        return wait + each * noted

    # sequences of this router

    def bind(self, request_id: str, tpot_limit_ms: float, expected_tokens: int) -> None:
        """A request will decode there; about ``expected_tokens`` are to come."""
        assert request_id not in self._bound, "a request is bound once"
        self._bound[request_id] = (tpot_limit_ms, expected_tokens)
        self._joining.add(request_id)
        self.joining = len(self._joining)
        self.expected_tokens += expected_tokens
        self._limits_ms[tpot_limit_ms] = self._limits_ms.get(tpot_limit_ms, 0) + 1
        if tpot_limit_ms < self.tpot_limit_ms:
            self.tpot_limit_ms = tpot_limit_ms

    def joined(self, request_id: str) -> None:
        """It decodes."""
        self._joining.discard(request_id)
        self.joining = len(self._joining)

    def unbind(self, request_id: str) -> None:
        """It does not decode there any more, or never will."""
        bound = self._bound.pop(request_id, None)
        if bound is None:
            return
        self._joining.discard(request_id)
        self.joining = len(self._joining)
        limit_ms, expected_tokens = bound
        self.expected_tokens -= expected_tokens
        left = self._limits_ms[limit_ms] - 1
        if left:
            self._limits_ms[limit_ms] = left
        else:
            del self._limits_ms[limit_ms]
            if limit_ms <= self.tpot_limit_ms:
                self.tpot_limit_ms = min(self._limits_ms, default=_INF)

    @property
    def bound(self) -> set[str]:
        """Requests of this router that decode there, or will."""
        return set(self._bound)

    def _contained(self, sent_by_s: float) -> list[str]:
        """Requests noted until then; they are noted in the order of time."""
        contained = []
        for request_id, noted in self._noted.items():
            if noted[0] > sent_by_s:
                break
            contained.append(request_id)
        return contained


class Fleet:
    """All workers by identity. ``stale``: the registry cannot be reached and this is its last word."""

    def __init__(self, salt: Callable[[WorkerKey], float] = lambda worker: 0.0) -> None:
        self._workers: dict[WorkerKey, WorkerView] = {}
        self._rosters: dict[str, Roster] = {}
        self._epochs: int | None = None
        self.counsel = Counsel(self.epochs)
        """What the balance controller advises."""
        self._salt = salt
        self._uses = 0
        self.stale = False

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, key: WorkerKey) -> WorkerView | None:
        """The worker, or None when it is not known."""
        return self._workers.get(key)

    def by_id(self, worker_id: str, incarnation: int) -> WorkerView | None:
        """As ``get``, from the parts."""
        return self._workers.get(WorkerKey(worker_id, incarnation))

    def put(self, info: WorkerInfo) -> WorkerView:
        """Add a worker or renew what is known of it."""
        view = self._workers.get(info.key)
        if view is None:
            view = self._workers[info.key] = WorkerView(info, self._salt(info.key), self._changed)
            self._changed()
        elif info.role_epoch >= view.info.role_epoch:
            view.info = info
        view.listed = True
        return view

    def remove(self, key: WorkerKey) -> None:
        """Forget a worker."""
        self._workers.pop(key, None)
        self._changed()

    def _changed(self) -> None:
        self._rosters.clear()
        self._epochs = None

    def epochs(self) -> int:
        """Sum of the role epochs of the workers that are listed: another one once any role, or who is there, is."""
        if self._epochs is None:
            self._epochs = sum(view.info.role_epoch for view in self._workers.values() if view.listed)
        return self._epochs

    def serving(self, model: str) -> Roster:
        """Workers that may be given new work for ``model``; kept until one comes, goes or changes."""
        roster = self._rosters.get(model)
        if roster is None:
            views = [view for view in self._workers.values() if view.usable and view.info.model == model]
            roster = Roster(views, followed=True)
            self._rosters[model] = roster
        return roster

    def able(self, model: str, demand: Demand) -> Roster:
        """As ``serving``, without those that could never hold ``demand`` or would go on with it in another way than it
        was begun; the same object for what is alike.
        """
        able = self.serving(model).holding(demand.prompt_tokens, demand.max_tokens)
        if demand.revision:
            able = able.of_revision(demand.revision)
        if demand.too_small and not demand.too_small.isdisjoint(able.members):
            return Roster(view for view in able if view.key not in demand.too_small)
        return able

    def could_decode(self, model: str, demand: Demand) -> bool:
        """Whether a worker that is known, usable now or not, could hold ``demand``; so it may be as long as none is."""
        known = [view for view in self._workers.values() if view.info.model == model and view.info.role.decodes]
        return not known or any(
            view.info.holds(demand.prompt_tokens, demand.max_tokens) and view.key not in demand.too_small
            for view in known
        )

    def token_limit(self, model: str) -> int:
        """Most tokens, prompt plus output, that a request to ``model`` can have; 0 when it is not known.

        That of the worker with most room of those that decode: what is prefilled elsewhere has to fit there too.
        """
        infos = [view.info for view in self._workers.values() if view.info.model == model and view.info.role.decodes]
        most = max([min(info.request_tokens, info.pool_tokens) for info in infos], default=_INF)
        return 0 if most == _INF else int(most)

    def settle(self, worker: WorkerKey, request_id: str) -> None:
        """See WorkerView.settle."""
        view = self._workers.get(worker)
        if view is not None:
            view.settle(request_id)

    def unbind(self, worker: WorkerKey, request_id: str) -> None:
        """See WorkerView.unbind."""
        view = self._workers.get(worker)
        if view is not None:
            view.unbind(request_id)

    def heard(self, worker: WorkerKey, now_s: float) -> None:
        """``worker`` said something."""
        view = self._workers.get(worker)
        if view is not None:
            view.heard_s = now_s

    def succeeded(self, worker: WorkerKey) -> None:
        """``worker`` did what it was asked to do."""
        view = self._workers.get(worker)
        if view is not None:
            view.breaker.succeeded()

    def failed(self, worker: WorkerKey, now_s: float) -> None:
        """``worker`` failed a request."""
        view = self._workers.get(worker)
        if view is not None:
            view.breaker.failed(now_s)

    def used(self, view: WorkerView) -> None:
        """Note that ``view`` was given work now."""
        self._uses += 1
        view.use(self._uses)
