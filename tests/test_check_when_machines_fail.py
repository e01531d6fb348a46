"""The checks of *When machines fail*: wrong answers are refused in words that say why."""

from typing import Any

import pytest
from solutions import refused

from d2lps_book.check import when_machines_fail as check

NUMBERS = {"failure": 30.4, "interval": 7.8, "rule": 0.42, "really": 0.52, "saving": 5}
DELAY = {"bsp": 4, "ssp2": 6, "ssp4": 8, "asp": 12}


def test_numbers_that_pass() -> None:
    assert check.delay(**DELAY)
    assert check.numbers(**NUMBERS)
    assert check.both(days=21, years=8_800)


def test_an_empty_class_is_a_stub() -> None:
    class Mine: ...

    assert check.survivor(Mine).text == "Mine is still empty" == check.epochs(Mine).text


@pytest.mark.parametrize(("wrong", "words"), [
    ({"failure": 3.09}, "failure, minutes: not 3.09."), ({"interval": 19}, "interval, minutes: not 19. Saving takes one"),
    ({"rule": 0.26}, "There is a term for restarting"), ({"rule": 42}, "a share such as 0.1: not 42."),
    ({"really": 0.42}, "really, a share: not 0.42. The hours"),
    ({"saving": 6.3}, "on top, really; it is to be a tenth"), ({"saving": 60}, "on top"),
    ({"saving": 5.6}, "10.05% comes on top"), ({"saving": 0}, "ZeroDivisionError"),
    ({"saving": 1}, "no more and hardly less"), ({"failure": "30 min"}, "failure, minutes: not '30 min'"),
], ids=str)  # fmt: skip
def test_numbers_misjudged(wrong: dict[str, float], words: str) -> None:
    refused(check.numbers(**NUMBERS | wrong), words)


# ---- a server that goes on ----------------------------------------------------------------------------------------------


class Survivor:
    """Right: what it remembers, and what it makes of a name, can be made wrong."""

    def __init__(self, disk: Any) -> None:
        self.value, self.last, self.disk = 0, {}, disk
        for name, amount in disk.records:
            self.apply(name, amount)

    def who(self, name: Any) -> Any:
        return name[0]

    def known(self, name: Any) -> bool:
        return name[1] <= self.last.get(self.who(name), 0)

    def apply(self, name: Any, amount: int) -> None:
        self.value += amount
        self.last[self.who(name)] = name[1]

    def handle(self, name: Any, amount: int) -> str:
        if not self.known(name):
            self.disk.append((name, amount))
            self.apply(name, amount)
        return "done"


class Forgets(Survivor):
    def __init__(self, disk: Any) -> None:
        super().__init__(type("Empty", (), {"records": [], "append": lambda self, record: None})())


class OneNameForAll(Survivor):
    """Remembers only the last push, whoever sent it."""

    def known(self, name: Any) -> bool:
        return bool(self.last.get("name") == name)

    def apply(self, name: Any, amount: int) -> None:
        self.value += amount
        self.last["name"] = name


class OneSequenceForAll(Survivor):
    def who(self, name: Any) -> Any:
        return "anybody"


class NoFilter(Survivor):
    def known(self, name: Any) -> bool:
        return False


class FilterInMemory(Survivor):
    def __init__(self, disk: Any) -> None:
        super().__init__(disk)
        self.last = {}


class AnswersFirst(Survivor):
    """Writes a push down when the next one comes."""

    due: Any = None

    def handle(self, name: Any, amount: int) -> str:
        if self.due:
            self.disk.append(self.due)
            self.due = None
        if not self.known(name):
            self.apply(name, amount)
            self.due = name, amount
        return "done"


class WritesAll(Survivor):
    def __init__(self, disk: Any) -> None:
        self.value, self.last, self.disk = 0, {}, disk
        for name, amount in disk.records:
            if not self.known(name):
                self.apply(name, amount)

    def handle(self, name: Any, amount: int) -> str:
        self.disk.append((name, amount))
        if not self.known(name):
            self.apply(name, amount)
        return "done"


class SaysNothing(Survivor):
    def handle(self, name: Any, amount: int) -> None:  # type: ignore[override]
        super().handle(name, amount)


class RefusesRepetitions(Survivor):
    def handle(self, name: Any, amount: int) -> str:
        return "known" if self.known(name) else super().handle(name, amount)


class TwoClients(Survivor):
    def who(self, name: Any) -> Any:
        return name[0] % 2


class ByAmount(Survivor):
    """Takes two pushes of the same amount for one."""

    def handle(self, name: Any, amount: int) -> str:
        return "done" if amount in [known for _, known in self.disk.records] else super().handle(name, amount)


@pytest.mark.parametrize(("wrong", "words"), [
    (Forgets, "push 1 stopped"),
    (OneNameForAll, "2 clients, push 2 stopped after its record was written, every client repeats its last push"),
    (OneSequenceForAll, "2 clients"), (NoFilter, "1 client, push 1 stopped after its record was written"),
    (FilterInMemory, "after its record was written"), (AnswersFirst, "after one more new life, the value is 0, not 1"),
    (WritesAll, "5 records: each push needs one, and repeated it needs none"), (SaysNothing, "got the answer None"),
    (RefusesRepetitions, "got the answer 'known'"), (TwoClients, "3 clients"),
    (ByAmount, "after pushes 1 to 4 the value is 6, not 7"),
])  # fmt: skip
def test_servers_that_forget(wrong: Any, words: str) -> None:
    assert check.survivor(Survivor)
    refused(check.survivor(wrong), words)


# ---- a checkpoint of all or nothing -------------------------------------------------------------------------------------


def load(disk: Any) -> dict[str, str]:
    step, *names = disk.texts["manifest"].split("|")
    return {name: disk.texts[f"{name} of step {step}"] for name in names}


def save(disk: Any, step: int, files: dict[str, str]) -> None:
    for name, text in files.items():
        disk.write(f"{name} of step {step}", text)
    disk.write("draft", "|".join([str(step), *files]))
    disk.rename("draft", "manifest")


def in_place(disk: Any, step: int, files: dict[str, str]) -> None:
    for name, text in files.items():
        disk.write(name, text)


def draft_of_each(disk: Any, step: int, files: dict[str, str]) -> None:
    for name, text in files.items():
        disk.write("draft", text)
        disk.rename("draft", name)


def manifest_first(disk: Any, step: int, files: dict[str, str]) -> None:
    disk.write("draft", "|".join([str(step), *files]))
    disk.rename("draft", "manifest")
    for name, text in files.items():
        disk.write(f"{name} of step {step}", text)


def manifest_in_place(disk: Any, step: int, files: dict[str, str]) -> None:
    for name, text in files.items():
        disk.write(f"{name} of step {step}", text)
    disk.write("manifest", "|".join([str(step), *files]))


def past_the_disk(disk: Any, step: int, files: dict[str, str]) -> None:
    disk.texts["manifest"] = "|".join([str(step), *files])


def in_memory(disk: Any, step: int, files: dict[str, str]) -> None:
    disk.files = dict(files)


KEPT: dict[str, dict[str, str]] = {}


def beside_the_disk(disk: Any, step: int, files: dict[str, str]) -> None:
    KEPT["files"] = files


def two_names(disk: Any, step: int, files: dict[str, str]) -> None:
    """Knows that there are two servers."""
    save(disk, step, {name: files.get(name, "") for name in ("server-0", "server-1")})


@pytest.mark.parametrize(("save", "load", "words"), [
    (in_place, lambda disk: disk.texts, "operation 1: load gives {'server-0': 'new sta', 'server-1': 'old state of 1'}"),
    (draft_of_each, lambda disk: disk.texts, "stopped in operation 1: load gives"),
    (draft_of_each, lambda disk: {name: text for name, text in disk.texts.items() if name != "draft"}, "stopped in operation 3"),
    (manifest_first, load, "with 2, then 2 servers, stopped in operation 3: load raises KeyError"),
    (manifest_in_place, load, "with 2, then 2 servers, stopped in operation 3: load raises"),
    (past_the_disk, load, "KeyError: 'manifest'"),
    (in_memory, lambda disk: disk.files, "AttributeError"), (two_names, load, "with 3, then 2 servers"),
    (save, lambda disk: {}, "load gives {}"), (beside_the_disk, lambda disk: KEPT["files"], "with the first checkpoint alone"),
], ids=["in place", "drafts, all read", "drafts", "first", "manifest", "past the disk", "memory", "two", "none", "kept"])
def test_checkpoints_of_neither(save: Any, load: Any, words: str) -> None:
    refused(check.checkpoint(save, load), words)


# ---- delays, epochs, copies, two at once --------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "words"), [
    ({"bsp": 3}, "bsp: they end more than 3"), ({"ssp2": 5}, "ssp2: they end more than 5"),
    ({"ssp4": 7}, "does a read at clock 7 wait"), ({"ssp4": 9}, "they end fewer than 9"),
    ({"asp": 4}, "does any read wait"), ({"bsp": 12}, "bsp: they end fewer"),
], ids=str)  # fmt: skip
def test_delays_misjudged(wrong: dict[str, int], words: str) -> None:
    refused(check.delay(**DELAY | wrong), words)


class WithEpochs:
    """Right; `known` says which (epoch, sequence) a client has come to."""

    def __init__(self) -> None:
        self.value, self.last = 0, {}

    def who(self, name: Any) -> Any:
        return name[0]

    def handle(self, name: Any, amount: int) -> str:
        epoch, done = self.last.get(self.who(name), (0, 0))
        if name[1] < epoch:
            return "refused"
        if name[1:] > (epoch, done):
            self.value += amount
            self.last[self.who(name)] = name[1:]
        return "done"


class EpochOfAll(WithEpochs):
    def who(self, name: Any) -> Any:
        return "anybody"


class NeverRefuses(WithEpochs):
    def handle(self, name: Any, amount: int) -> str:
        super().handle(name, amount)
        return "done"


class CountsOldLives(WithEpochs):
    def who(self, name: Any) -> Any:
        return name[:2]


class SequenceOnly(WithEpochs):
    def handle(self, name: Any, amount: int) -> str:
        return super().handle((name[0], 1, name[2]), amount)


class NoFilterAtAll(WithEpochs):
    def handle(self, name: Any, amount: int) -> str:
        said = super().handle(name, 0)
        self.value += amount * (said == "done")
        return said


class Ones(WithEpochs):
    def handle(self, name: Any, amount: int) -> str:
        return super().handle(name, 1)


@pytest.mark.parametrize("wrong", [EpochOfAll, NeverRefuses, CountsOldLives, SequenceOnly, NoFilterAtAll, Ones])
def test_filters_that_forget_lives(wrong: Any) -> None:
    assert check.epochs(WithEpochs)
    verdict = check.epochs(wrong)
    assert not verdict and "the last of these was answered" in verdict.text


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda m, n, bandwidth, copies: (m + copies) * n / bandwidth, "0 copies, seconds: not 0.01. Which messages share"),
    (lambda m, n, bandwidth, copies: 2 * (m + copies) * n / bandwidth, "1 copies, seconds: not 0.04."),
    (lambda m, n, bandwidth, copies: max(m, copies) * 2 * n / bandwidth, "1 copies, seconds: not 0.02."),
    (lambda m, n, bandwidth, copies: (2 * m + copies) * n / bandwidth * 1e3, "a thousand times too large: in which unit"),
    (lambda m, n, bandwidth, copies: 0.08 + copies / 100, "m = 1, n = 10 MB"),
    (lambda m, n, bandwidth, copies: (2 * m + copies) * n / 1e9, "0.2 GB/s"),
], ids=["answers forgotten", "copies twice", "side by side", "in ms", "for m = 4", "one bandwidth"])  # fmt: skip
def test_rounds_misjudged(wrong: Any, words: str) -> None:
    refused(check.round_time(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    ({"days": 2114}, "there are 100"), ({"years": 17_600}, "either machine may fail first"), ({"years": 880_000}, "Of 100 pairs"),
    ({"years": 5.8}, "years: not 5.8."),
], ids=str)  # fmt: skip
def test_two_at_once_misjudged(wrong: dict[str, float], words: str) -> None:
    refused(check.both(**{"days": 21, "years": 8_800} | wrong), words)
