"""The checks of *When machines fail*: wrong answers are refused in words that say why."""

from solutions import refusing

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


WRITTEN = 'disk.write(f"{name} of step {step}", text) -> '
MANIFEST = 'disk.write("draft", "|".join([str(step), *files]))\n    disk.rename("draft", "manifest") -> '
READ = "step, *names = -> return {}\n    step, *names ="
KNOWN, SEQUENCE = "if sequence > self.last.get(client, 0): -> ", "client, sequence = name -> "
CLIENT, SECONDS = "client, epoch, sequence = name -> client, epoch, sequence = ", "(2 * m + copies) * n / bandwidth -> "
TWICE = "the last of these was answered"

test_refused = refusing({
    "ex-fail-numbers numbers": [(f"**{NUMBERS | wrong}", words) for wrong, words in (
        ({"failure": 3.09}, "failure, minutes: not 3.09."), ({"interval": 19}, "interval, minutes: not 19. Saving takes one"),
        ({"rule": 0.26}, "There is a term for restarting"), ({"rule": 42}, "a share such as 0.1: not 42."),
        ({"really": 0.42}, "really, a share: not 0.42. The hours"), ({"saving": 6.3}, "on top, really; it is to be a tenth"),
        ({"saving": 60}, "on top"), ({"saving": 5.6}, "10.05% comes on top"), ({"saving": 0}, "ZeroDivisionError"),
        ({"saving": 1}, "no more and hardly less"), ({"failure": "30 min"}, "failure, minutes: not '30 min'"),
    )],
    "ex-fail-server survivor": [
        ("for name, amount in disk.records: -> for name, amount in ():", "push 1 stopped"),
        (("for name, amount in disk.records:\n            super().handle(name, amount) -> "  # the last push, whoever sent it
          "for self.newest, amount in disk.records:\n            super().handle(self.newest, amount)",
          f"{KNOWN}if vars(self).get('newest') == name:\n            return 'done'\n"
          "        self.newest, self.last = name, {}\n        if True:"),
         "2 clients, push 2 stopped after its record was written, every client repeats its last push"),
        (f"{SEQUENCE}client, sequence = name = 'anybody', name[1]", "2 clients"),
        (f"{KNOWN}self.last = {{}}\n        if True:", "1 client, push 1 stopped after its record was written"),
        ("amount)\n\n    def handle -> amount)\n        self.last = {}\n\n    def handle", "after its record was written"),
        ((f"{SEQUENCE}if due := vars(self).pop('due', None):\n            self.disk.append(due)\n        client, sequence = name",
          "self.disk.append((name, amount)) -> self.due = name, amount"),  # written down when the next one comes
         "after one more new life, the value is 0, not 1"),
        (f"{KNOWN}if True:", "5 records: each push needs one, and repeated it needs none"),
        ("self.disk.append((name, amount))\n        return super() -> self.disk.append((name, amount))\n        super()",
         "got the answer None"),
        (f"{KNOWN}if sequence <= self.last.get(client, 0): return 'known'\n        if True:", "got the answer 'known'"),
        (f"{SEQUENCE}client, sequence = name = name[0] % 2, name[1]", "3 clients"),
        (f"{SEQUENCE}if amount in [known for _, known in self.disk.records]:\n            return 'done'\n"
         "        client, sequence = name", "after pushes 1 to 4 the value is 6, not 7"),
    ],
    "ex-fail-checkpoint checkpoint": [
        ((f"{WRITTEN}disk.write(name, text)", f"{MANIFEST}pass", READ.format("disk.texts")),
         "operation 1: load gives {'server-0': 'new sta', 'server-1': 'old state of 1'}"),
        ((f"{WRITTEN}disk.write('draft', text); disk.rename('draft', name)", f"{MANIFEST}pass", READ.format("disk.texts")),
         "stopped in operation 1: load gives"),
        ((f"{WRITTEN}disk.write('draft', text); disk.rename('draft', name)", f"{MANIFEST}pass",
          READ.format("{name: text for name, text in disk.texts.items() if name != 'draft'}")), "stopped in operation 3"),
        ((f"{MANIFEST}pass", "for name, text in files.items(): -> disk.write('draft', '|'.join([str(step), *files])); "
          "disk.rename('draft', 'manifest')\n    for name, text in files.items():"),
         "with 2, then 2 servers, stopped in operation 3: load raises KeyError"),
        (f'{MANIFEST}disk.write("manifest", "|".join([str(step), *files]))',
         "with 2, then 2 servers, stopped in operation 3: load raises"),
        ((f"{WRITTEN}pass", f'{MANIFEST}disk.texts["manifest"] = "|".join([str(step), *files])'), "KeyError: 'manifest'"),
        ("lambda disk, step, files: setattr(disk, 'files', dict(files)), lambda disk: disk.files", "AttributeError"),
        ("lambda disk, step, files: save(disk, step, {name: files.get(name, '') for name in ('server-0', 'server-1')}), load",
         "with 3, then 2 servers"),
        ("save, lambda disk: {}", "load gives {}"),
        ("lambda disk, step, files, kept=(kept := {}): kept.update(files=files), lambda disk: kept['files']",
         "with the first checkpoint alone"),
    ],
    "ex-fail-delay delay": [(f"**{DELAY | wrong}", words) for wrong, words in (
        ({"bsp": 3}, "bsp: they end more than 3"), ({"ssp2": 5}, "ssp2: they end more than 5"),
        ({"ssp4": 7}, "does a read at clock 7 wait"), ({"ssp4": 9}, "they end fewer than 9"),
        ({"asp": 4}, "does any read wait"), ({"bsp": 12}, "bsp: they end fewer"),
    )],
    "ex-fail-epoch epochs": [
        (f"{CLIENT}'anybody', *name[1:]", TWICE),
        ('return "refused" -> return "done"', TWICE),
        (f"{CLIENT}name[:2], *name[1:]", TWICE),
        (f"{CLIENT}name[0], 1, name[2]", TWICE),
        ("if (epoch, sequence) > (newest, done): -> if True:", TWICE),
        ("super().handle(name, amount)\n            self.last -> super().handle(name, 1)\n            self.last", TWICE),
    ],
    "ex-fail-copies round_time": [
        (f"{SECONDS}(m + copies) * n / bandwidth", "0 copies, seconds: not 0.01. Which messages share"),
        (f"{SECONDS}2 * (m + copies) * n / bandwidth", "1 copies, seconds: not 0.04."),
        (f"{SECONDS}max(m, copies) * 2 * n / bandwidth", "1 copies, seconds: not 0.02."),
        (f"{SECONDS}(2 * m + copies) * n / bandwidth * 1e3", "a thousand times too large: in which unit"),
        (f"{SECONDS}0.08 + copies / 100", "m = 1, n = 10 MB"),
        (f"{SECONDS}(2 * m + copies) * n / 1e9", "0.2 GB/s"),
    ],
    "ex-fail-both both": [
        ("days=2114, years=8_800", "there are 100"), ("days=21, years=17_600", "either machine may fail first"),
        ("days=21, years=880_000", "Of 100 pairs"), ("days=21, years=5.8", "years: not 5.8."),
    ],
})  # fmt: skip
