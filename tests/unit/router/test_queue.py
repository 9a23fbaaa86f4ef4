"""Fair queueing: nobody is lost, nobody waits while others are served out of proportion."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.services.router.queue import FairQueue, Waiting

QUANTUM = 64
MAX_COST = 300


def item(number: int, tenant: str, cost: int = 1, priority: int = 0) -> Waiting:
    return Waiting(f"r{number}", tenant, priority, number, cost)


def served(queue: FairQueue, count: int) -> list[Waiting]:
    out = []
    for _ in range(count):
        head = queue.head()
        if head is None:
            break
        assert queue.head() == head, "looking changes nothing"
        queue.serve(head)
        queue.check_integrity()
        out.append(head)
    return out


def test_one_tenant_is_served_in_order() -> None:
    queue = FairQueue(QUANTUM)
    for number in (3, 1, 2):
        queue.put(item(number, "a", cost=500))
    assert [waiting.order for waiting in served(queue, 5)] == [1, 2, 3]
    assert queue.head() is None
    assert len(queue) == 0


def test_a_light_tenant_is_not_behind_a_heavy_one() -> None:
    queue = FairQueue(QUANTUM)
    for number in range(100):
        queue.put(item(number, "heavy", cost=64))
    queue.put(item(100, "light", cost=64))
    order = [waiting.tenant for waiting in served(queue, 4)]
    assert "light" in order


def test_higher_priorities_go_first() -> None:
    queue = FairQueue(QUANTUM)
    queue.put(item(1, "a"))
    queue.put(item(2, "b", priority=5))
    queue.put(item(3, "a", priority=5))
    assert {waiting.order for waiting in served(queue, 2)} == {2, 3}
    assert served(queue, 1)[0].order == 1


def test_who_comes_back_gets_its_old_place() -> None:
    queue = FairQueue(QUANTUM)
    first = item(1, "a")
    queue.put(first)
    queue.put(item(2, "a"))
    assert queue.remove("r1")
    assert not queue.remove("r1")
    queue.put(item(1, "a"))
    queue.check_integrity()
    assert [waiting.order for waiting in served(queue, 2)] == [1, 2]
    assert queue.of_tenant("a") == 0


def test_what_is_removed_does_not_gather() -> None:
    queue = FairQueue(QUANTUM)
    queue.put(item(0, "a"))
    for number in range(1, 2_000):
        queue.put(item(number, "a"))
        queue.remove(f"r{number}")
    assert len(queue._levels[0].tenants["a"]) <= 2 + 64
    queue.check_integrity()


@settings(max_examples=150, deadline=None)
@given(
    costs=st.lists(st.integers(1, MAX_COST), min_size=2, max_size=5),
    rounds=st.integers(1, 200),
)
def test_tenants_that_always_wait_are_served_the_same_cost(costs: list[int], rounds: int) -> None:
    """Each tenant has requests of one size and never runs dry."""
    queue = FairQueue(QUANTUM)
    number = 0
    for tenant, cost in enumerate(costs):
        for _ in range(2):
            queue.put(item(number, str(tenant), cost))
            number += 1
    got: Counter[str] = Counter()
    for _ in range(rounds):
        head = queue.head()
        assert head is not None
        queue.serve(head)
        got[head.tenant] += head.cost
        queue.put(item(number, head.tenant, head.cost))
        number += 1
    shares = [got[str(tenant)] for tenant in range(len(costs))]
    assert max(shares) - min(shares) <= 2 * (QUANTUM + MAX_COST)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_order_of_puts_removes_and_serves(data: st.DataObject) -> None:
    queue = FairQueue(QUANTUM)
    waiting: dict[str, Waiting] = {}
    number = 0
    for action in data.draw(st.lists(st.sampled_from(["put", "put", "remove", "serve", "back"]), max_size=60)):
        if action == "put":
            number += 1
            tenant = data.draw(st.sampled_from("abc"))
            new = item(number, tenant, data.draw(st.integers(1, MAX_COST)), data.draw(st.integers(0, 2)))
            queue.put(new)
            waiting[new.request_id] = new
        elif action == "serve":
            head = queue.head()
            assert (head is None) == (not waiting)
            if head is not None:
                assert head.priority == max(one.priority for one in waiting.values())
                rivals = [
                    one.order for one in waiting.values() if (one.tenant, one.priority) == (head.tenant, head.priority)
                ]
                assert head.order == min(rivals)
                queue.serve(waiting.pop(head.request_id))
        elif waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            assert queue.remove(name)
            if action == "back":
                queue.put(waiting[name])
            else:
                del waiting[name]
        queue.check_integrity()
        assert len(queue) == len(waiting)
