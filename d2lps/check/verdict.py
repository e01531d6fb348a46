"""What a check says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """True if the function passed; its text, shown as the result of a cell, says how well, or what is wrong and where."""

    passed: bool
    text: str

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{'passed' if self.passed else 'not yet'}: {self.text}"
