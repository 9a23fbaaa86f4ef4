from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.models.stops import StopMatcher


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def run(stops: list[str], chunks: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for chunk in chunks:
        emitted, matched = matcher.push(chunk)
        shown += emitted
        if matched is not None:
            return shown, matched
    emitted, matched = matcher.flush()
    return shown + emitted, matched


def expected(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    matches = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    start, length, stop = min(matches)
    return text[: start + length * include], stop


small_text = st.text(alphabet="abc🎉", max_size=24)
small_stops = st.lists(st.text(alphabet="abc🎉", min_size=1, max_size=6), max_size=5)


@given(small_stops, small_text, st.lists(st.integers(0, 30), max_size=12), st.booleans())
def test_any_chunking_cuts_at_the_first_stop(stops: list[str], text: str, cuts: list[int], include: bool) -> None:
    assert run(stops, chunked(text, cuts), include) == expected(stops, text, include)


@given(small_stops, small_text)
def test_holds_back_only_what_may_begin_a_stop(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for char in text:
        emitted, matched = matcher.push(char)
        seen += char
        shown += emitted
        if matched is not None:
            return
        held = seen[len(shown) :]
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        open_match = any(stop in held for stop in stops)
        assert len(held) == longest or (open_match and any(s.startswith(held) for s in stops))


def test_no_stops_hold_nothing_back() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ("", None)


def test_stop_across_pushes() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Hi.\nUs") == ("Hi.", None)
    assert matcher.push("er: more") == ("", "\nUser:")
    assert matcher.matched == "\nUser:"
    assert matcher.flush() == ("", "\nUser:")


def test_included_stop_is_emitted_but_nothing_after_it() -> None:
    assert StopMatcher(["."], include=True).push("One. Two.") == ("One.", ".")


def test_of_stops_that_start_together_the_shortest_wins() -> None:
    assert StopMatcher(["abc", "ab"]).push("xabc") == ("x", "ab")


def test_a_longer_stop_that_began_earlier_delays_the_match() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", None)
    assert matcher.push("d") == ("", "abcd")
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", None)
    assert matcher.flush() == ("a", "bc")


def test_misuse_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError):
        StopMatcher([""])
    matcher = StopMatcher(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")
