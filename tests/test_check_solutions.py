"""The printed solution of every exercise, in every chapter, passes its check."""

import pytest
from solutions import printed, solution

FILLED_IN_A_LOOP = {"ex-consistency-pause", "ex-fail-delay"}  # the tests of their chapters hand in what the loop gives
CALLS = {name: call for name, call in printed().items() if call[0] not in FILLED_IN_A_LOOP}


@pytest.mark.parametrize(("label", "call"), CALLS.values(), ids=CALLS)
def test_solution_passes(label: str, call: str) -> None:
    verdict = solution(label).value(call)
    assert verdict, verdict
