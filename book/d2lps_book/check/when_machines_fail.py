"""Checks of the chapter *When machines fail*: servers and checkpoints that are stopped everywhere, and what safety costs."""

import math
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import product
from typing import Any

from d2lps_book.check.exercise import Function, Wrong, answered, judged, plural, raised
from d2lps_book.check.tools import near, refuse

_M = 24 * 54 / 419 * 16_384 / 100_000  # hours between failures, of 100,000 GPUs like those of Llama 3


def _over(saving: float, restarting: float) -> float:
    """What comes on top of the work, at Young's interval; both in hours."""
    tau = math.sqrt(2 * saving * _M)
    return (_M + restarting) * math.expm1((tau + saving) / _M) / tau - 1


@answered
def numbers(failure: float, interval: float, rule: float, really: float, saving: float) -> str:
    """Check minutes between failures and between checkpoints, the shares on top, and the seconds that saving may take."""
    tau = math.sqrt(2 / 60 * _M)
    near("failure, minutes", failure, 60 * _M, "How often does one of these GPUs fail, and there are 100,000", 0.03)
    near("interval, minutes", interval, 60 * tau, "Saving takes one, and M is no longer three hours", 0.03)
    by_rule = math.sqrt(2 / 60 / _M) + 5 / 60 / _M
    near("rule, a share such as 0.1", rule, by_rule, "There is a term for restarting as well", 0.03)
    hours = "The hours that tau + c uninterrupted ones take, over tau, less 1"
    near("really, a share", really, _over(1 / 60, 5 / 60), hours, 0.03)
    if not 0.095 < (found := _over(saving / 3600, 30 / 3600)) <= 0.1:
        raise Wrong(f"saving: with {saving:g} s, {found:.2%} comes on top, really; it is to be a tenth, no more and hardly less")
    return f"a failure every {failure:.0f} minutes, and {saving:g} s to save"


# ---- a server that goes on ----------------------------------------------------------------------------------------------


_MOMENTS = {"before": "before its record was written", "after": "after its record was written", "end": "after its answer"}


class _Crash(Exception):
    """The machine stops here."""


class _Disk:
    """Keeps what was appended; the machine may stop just before or just after."""

    stop, records = "", ()

    def append(self, record: Any) -> None:
        self.records = (*self.records, *[record] * (self.stop != "before"))
        if self.stop in ("before", "after"):
            raise _Crash


@judged
def survivor(make: Callable[[Any], Any]) -> str:
    """Check a class `Survivor(disk)` with `handle((client, sequence), amount)` and `value`: every push counts once."""
    lives = [(n, victim, moment) for n in (1, 2, 3) for moment in _MOMENTS for victim in range(1, 3 * n + 1)]
    for life in lives:
        _lived(make, *life)
    return f"{len(lives)} crashes, pushes of 1 to 3 clients"


def _lived(make: Callable[[Any], Any], clients: int, victim: int, moment: str) -> None:
    """Clients push in turn; the machine stops in one push; then every client repeats what it sent last."""
    disk, names = _Disk(), [(push % clients, push // clients + 1) for push in range(4 * clients)]
    server, expected = make(disk), 0
    for number, name in enumerate(names, 1):
        disk.stop = moment if number == victim else ""
        with suppress(_Crash):
            _handled(server, name, _amount(number))
        expected += _amount(number)
        if number == victim:
            disk.stop, server = "", make(disk)
            for again in range(max(1, number - clients + 1), number + 1):
                _handled(server, names[again - 1], _amount(again))
        who = f"{plural(clients, 'client')}"
        case = f"{who}, push {victim} stopped {_MOMENTS[moment]}, every client repeats its last push"
        for what, value in (("", server.value), (", after one more new life,", make(disk).value)):
            if value != expected:
                pushes = f"pushes 1 to {number}" if number > 1 else "push 1"
                raise Wrong(f"{case}: after {pushes}{what} the value is {value}, not {expected}")
    if len(disk.records) > len(names):
        raise Wrong(f"{len(names)} pushes wrote {len(disk.records)} records: each push needs one, and repeated it needs none")


def _amount(number: int) -> int:
    """What this push adds: others add as much, so that it is not known by its amount."""
    return 1 + (number - 1) % 3


def _handled(server: Any, name: Any, amount: int) -> None:
    if (said := server.handle(name, amount)) != "done":
        raise Wrong(f"push {name} got the answer {said!r}, not 'done': its client would repeat it forever")


# ---- a checkpoint of all or nothing -------------------------------------------------------------------------------------


class _Files:
    """A disk; the machine stops in the midst of operation number `stop`. `texts` can be read, not written."""

    def __init__(self, stop: int = 0, texts: Iterable[tuple[str, str]] = ()) -> None:
        self._texts, self.stop, self.count = dict(texts), stop, 0

    @property
    def texts(self) -> dict[str, str]:
        return dict(self._texts)

    def write(self, name: str, text: str) -> None:
        self._texts[name] = text[: len(text) // 2] if self.count + 1 == self.stop else text
        self._count()

    def rename(self, old: str, new: str) -> None:
        self._count()
        self._texts[new] = self._texts.pop(old)

    def _count(self) -> None:
        self.count += 1
        if self.count == self.stop:
            raise _Crash


@judged
def checkpoint(save: Function, load: Function) -> str:
    """Check `save(disk, step, files)` and `load(disk)`: wherever the machine stops, the old files or the new, whole."""
    operations = [_stopped_everywhere(save, load, *servers) for servers in ((2, 2, 2), (3, 2, 3), (1, 3, 2))]
    return f"stopped in each of {operations[0]} operations of 2 servers, and where servers came and went"


def _stopped_everywhere(save: Function, load: Function, *servers: int) -> int:
    old, new, third = ({f"server-{i}": f"{age} state of {i}" for i in range(count)}
                       for age, count in zip(("old", "new", "third"), servers, strict=True))  # fmt: skip
    for stop in range(1, 100):
        first, done = _Files(), False
        save(first, 1, old)
        disk = _Files(stop, first.texts.items())
        with suppress(_Crash):
            save(disk, 2, new)
            done = True
        where = f"with {servers[0]}, then {servers[1]} servers, stopped in operation {stop}"
        _loads(load, disk, [new] if done else [old, new], "" if done else where)
        again = _Files(0, disk.texts.items())
        save(again, 3, third)
        _loads(load, again, [third], f"{where}, and after the next checkpoint")
        _loads(load, first, [old], "from the disk with the first checkpoint alone")
        if done:
            return stop - 1
    raise Wrong("it writes and renames without end")


def _loads(load: Function, disk: _Files, right: list[dict[str, str]], where: str) -> None:
    """A machine that has just started knows nothing but what lies on the disk."""
    try:
        found = load(_Files(0, disk.texts.items()))
    except Exception as error:
        raise Wrong(f"{where or 'never stopped'}: load raises {raised(error)}") from error
    refuse((found not in right, f"{where or 'never stopped'}: load gives {found}"))


# ---- delays, epochs, copies, two at once --------------------------------------------------------------------------------


@answered
def delay(bsp: int, ssp2: int, ssp4: int, asp: int) -> str:
    """Check how many iterations the living end before the news, if worker 2 has died after 3 of 12, and a round is a second."""
    for name, said, bound in (("bsp", bsp, 0), ("ssp2", ssp2, 2), ("ssp4", ssp4, 4), ("asp", asp, math.inf)):
        right = min(4 + bound, 12)
        if said != right:
            hint = "does any read wait?" if bound == math.inf else f"does a read at clock {said:g} wait, if the slowest is at 3?"
            raise Wrong(f"{name}: they end {'more' if said < right else 'fewer'} than {said:g}; {hint}")
    return f"{bsp}, {ssp2}, {ssp4} and {asp} iterations"


@judged
def epochs(make: Callable[[], Any]) -> str:
    """Check a class `WithEpochs()` with `handle((client, epoch, sequence), amount)` and `value`."""
    for seed in range(20):
        dice, server, told = random.Random(seed), make(), []
        newest: dict[Any, tuple[int, int]] = {}
        value = 0
        for _ in range(40):
            client, amount = dice.choice([0, 7, 12]), dice.randint(1, 9)
            epoch, done = newest.get(client, (1, 0))
            name, said, counts = dice.choice((
                ((client, epoch, done + 1), "done", True), ((client, epoch, max(done, 1)), "done", not done),
                ((client, epoch + 1, 1), "done", True), ((client, epoch - 1, dice.randint(1, 99)), "refused", False),
            ))  # fmt: skip
            if said == "refused" and client not in newest:
                continue
            told.append(name)
            newest[client] = newest.get(client, (1, 0)) if said == "refused" else (name[1], name[2])
            value += amount * counts
            found = server.handle(name, amount)
            if (found, server.value) != (said, value):
                raise Wrong(f"after {', '.join(map(str, told[-4:]))}: the last of these was answered {found!r} and the value is"
                            f" {server.value}; they should be {said!r} and {value}")
    return "20 stories of 40 pushes"


@judged
def round_time(function: Function) -> str:
    """Check `round_time(m, n, bandwidth, copies)`: pushes of n bytes, then copies, then answers, through a server's link."""
    for m, n, bandwidth, copies in product((1, 4, 7), (1e7, 3e5), (1e9, 2e8), (0, 1, 3)):
        case = f"m = {m}, n = {n / 1e6:g} MB, {bandwidth / 1e9:g} GB/s, {copies} copies, seconds"
        seconds = (2 * m + copies) * n / bandwidth
        near(case, function(m, n, bandwidth, copies), seconds, "Which messages share the primary's link, and which way?", 0.01)
    return "36 cases"


@answered
def both(days: float, years: float) -> str:
    """Check the days until the first of 100 servers fails, and the years until some primary and its backup are both lost."""
    lifetime, repair = 24 * 54 / 419 * 16_384, 10 / 60
    near("days", days, lifetime / 100 / 24, "One fails every 5.8 years, and there are 100", 0.03)
    near("years", years, lifetime**2 / (200 * repair) / 24 / 365,
         "Of 100 pairs, either machine may fail first, and then the other within ten minutes", 0.03)  # fmt: skip
    return f"{days:.0f} days, {years:,.0f} years"
