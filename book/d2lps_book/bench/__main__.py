"""The command line: `python -m d2lps_book.bench [all_reduce] [startup] [simulator] [kvstore] [ddp] [--json FILE]`."""

import argparse
import json
from pathlib import Path

from d2lps_book.bench import all_reduce, ddp, kvstore, simulator, startup

TABLES = {table.__name__.rpartition(".")[2]: table.table for table in (all_reduce, startup, simulator, kvstore, ddp)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m d2lps_book.bench", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", choices=TABLES, help="one or more of %(choices)s; by default all")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file, by table")
    arguments = parser.parse_args()
    figures = {}
    for name in arguments.tables or TABLES:
        text, figures[name] = TABLES[name]()
        print(text, end="\n\n", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
