"""The printed solution of every exercise, in every chapter, passes its check."""

import pytest
from solutions import printed, solution, tried

FILLED_IN_A_LOOP = {"ex-consistency-pause", "ex-fail-delay"}  # the tests of their chapters hand in what the loop gives
CALLS = {name: call for name, call in printed().items() if call[0] not in FILLED_IN_A_LOOP}


@pytest.mark.parametrize(("label", "call"), CALLS.values(), ids=CALLS)
def test_solution_passes(label: str, call: str) -> None:
    verdict = solution(label).value(call)
    assert verdict, verdict


def test_a_change_of_what_is_not_printed_once_fails_in_words() -> None:
    for change, times in (("y + bias + 1 -> y", "0 times"), ("comm -> None", "4 times")):
        with pytest.raises(AssertionError, match=f"the solution of ex-tensor-row has '.*' {times}, not once:\ndef row"):
            tried("ex-tensor-row row", change)
