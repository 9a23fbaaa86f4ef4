"""Which work a worker takes now: its role, the epoch of the role, and what it drains towards. Pure."""

from weir.errors import FailedPrecondition, Unavailable, WeirError
from weir.lifecycle import Role


class RoleGate:
    """One change at a time: ``begin_change``, drain what the new role does not do, ``finish_change``.

    While a change is under way only work of both roles is taken, so that nothing new has to be drained. Work
    that is refused gets UNAVAILABLE: the router sends it elsewhere.
    """

    def __init__(self, worker_id: str, role: Role) -> None:
        self.role = role
        self.epoch = 1
        self.target: Role | None = None
        self.stopping = False
        self.fault: WeirError | None = None
        self._worker_id = worker_id

    @property
    def draining(self) -> bool:
        """Whether this worker is on the way to another role or to its end."""
        return self.stopping or self.target is not None or self.fault is not None

    def begin_change(self, role: Role, expected_epoch: int) -> None:
        """Start to change; FailedPrecondition for a stale epoch, a change under way, or a worker that stops."""
        if expected_epoch != self.epoch:
            raise FailedPrecondition(f"role epoch is {self.epoch}, the caller saw {expected_epoch}")
        if self.target is not None:
            raise FailedPrecondition(f"a change to {self.target.value} is under way")
        if self.stopping or self.fault is not None:
            raise FailedPrecondition("the worker is stopping")
        self.target = role

    def finish_change(self) -> None:
        """The new role is in force."""
        assert self.target is not None
        self.role, self.target = self.target, None
        self.epoch += 1

    def abandon_change(self) -> None:
        """The change did not happen."""
        self.target = None

    def check_prefills(self) -> None:
        """Raise unless a prompt may be prefilled here for another worker."""
        self._check(self.role.prefills, self.target is None or self.target.prefills, "prefills")

    def check_decodes(self) -> None:
        """Raise unless a sequence may be decoded here."""
        self._check(self.role.decodes, self.target is None or self.target.decodes, "decodes")

    def _check(self, now: bool, then: bool, what: str) -> None:
        if self.fault is not None:
            raise Unavailable(f"worker {self._worker_id} has no engine any more: {self.fault}")
        if self.stopping:
            raise Unavailable(f"worker {self._worker_id} is stopping")
        if not now:
            raise Unavailable(f"worker {self._worker_id} is a {self.role.value} worker and takes no {what}")
        if not then:
            assert self.target is not None
            raise Unavailable(f"worker {self._worker_id} is becoming a {self.target.value} worker")
