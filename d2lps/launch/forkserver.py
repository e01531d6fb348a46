"""Two processes stand between the caller and its ranks, so that starting is fast and ending is certain.

    caller ── fork server       imports torch once, then only forks; one for each caller, it goes when the caller goes
                └── keeper      one for each run: forks the ranks, reports those that end, and kills the rest when its
                      ├── rank  socket to the caller closes, for whatever reason: a finished run, an error, kill -9
                      └── rank

Importing torch takes seconds, forking a process that has imported it takes milliseconds. The standard library's forkserver
has this half of it; its children outlive the caller. The other half is the keeper (see `keeper`).
"""

import gc
import importlib
import os
import signal
import socket
import sys

import torch

from d2lps.launch import objects_and_files as messages
from d2lps.launch.keeper import keep, live


def serve(caller: socket.socket) -> None:
    """Fork a keeper for every socket that the caller sends, until the caller is gone.

    Between them the caller may name modules that ranks had to import: those that follow find them here.
    """
    torch.set_num_threads(1)  # before the fork: no thread pool to lose
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the keepers
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks a rank where it is: may come before the rank has a handler
    gc.freeze()  # ranks need not look for garbage in all this, and copy its pages by doing so
    while True:
        try:
            names, files = messages.receive(caller)
        except (EOFError, OSError):
            return
        if not files:
            for name in names:
                importlib.import_module(name)
            continue
        (run,) = files
        if os.fork() == 0:
            caller.close()
            live(keep, socket.socket(fileno=run))
        os.close(run)


if __name__ == "__main__":
    live(serve, socket.socket(fileno=int(sys.argv[1])))  # its end need not take apart what torch has built
