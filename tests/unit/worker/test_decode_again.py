"""A sequence that is bound again to the decode worker it was on, after its router's session broke."""

from tests.unit.worker.kv_cases import KEY, OURS, peer, request
from weir.attempts.desk import AttemptOver
from weir.engine.request import Mode
from weir.services.decode.desk import DecodeDesk


def test_the_same_attempt_in_a_new_session_is_told_to_come_back() -> None:
    desk = DecodeDesk(OURS, vocab_size=64)
    desk.open_session("old")
    desk.begin("old", request(mode=Mode.REMOTE), peer())
    desk.end_session("old")
    desk.open_session("new")
    desk.begin("new", request(mode=Mode.REMOTE), peer())
    (over,) = desk.take_news("new")
    assert isinstance(over, AttemptOver)
    assert (over.key, over.code) == (KEY, "RESOURCE_EXHAUSTED")
    assert over.retry_after_s == 0.05
