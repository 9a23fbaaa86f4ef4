"""Which work is taken before, during and after a change of role."""

import pytest

from weir.errors import FailedPrecondition, InternalError, Unavailable
from weir.lifecycle import Role
from weir.services.worker.role_gate import RoleGate


def taken(gate: RoleGate) -> tuple[bool, bool]:
    """Whether (prefills, decodes) are taken now."""

    def passes(check: object) -> bool:
        try:
            check()  # type: ignore[operator]
        except (Unavailable, InternalError):
            return False
        return True

    return passes(gate.check_prefills), passes(gate.check_decodes)


@pytest.mark.parametrize("old", Role)
@pytest.mark.parametrize("new", Role)
def test_only_work_of_both_roles_is_taken_during_a_change(old: Role, new: Role) -> None:
    gate = RoleGate("w", old)
    assert taken(gate) == (old.prefills, old.decodes)
    gate.begin_change(new, 1)
    assert gate.draining
    assert taken(gate) == (old.prefills and new.prefills, old.decodes and new.decodes)
    gate.finish_change()
    assert (gate.role, gate.epoch, gate.draining) == (new, 2, False)
    assert taken(gate) == (new.prefills, new.decodes)


def test_one_change_at_a_time_and_no_stale_epoch() -> None:
    gate = RoleGate("w", Role.PREFILL)
    with pytest.raises(FailedPrecondition, match="role epoch is 1, the caller saw 0"):
        gate.begin_change(Role.DECODE, 0)
    gate.begin_change(Role.DECODE, 1)
    with pytest.raises(FailedPrecondition, match="a change to decode is under way"):
        gate.begin_change(Role.MIXED, 1)
    gate.abandon_change()
    assert (gate.role, gate.epoch) == (Role.PREFILL, 1)
    gate.stopping = True
    with pytest.raises(FailedPrecondition, match="stopping"):
        gate.begin_change(Role.DECODE, 1)
    with pytest.raises(Unavailable, match="worker w is stopping"):
        gate.check_prefills()


def test_a_fault_is_told_to_everybody() -> None:
    gate = RoleGate("w", Role.MIXED)
    gate.fault = InternalError("gone")
    assert taken(gate) == (False, False)
    assert gate.draining
    for check in (gate.check_prefills, gate.check_decodes):
        # A refusal that moves the request, and does not count as one of its failures.
        with pytest.raises(Unavailable, match="worker w has no engine any more: gone"):
            check()
