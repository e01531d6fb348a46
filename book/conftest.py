"""Kernels of notebooks under test are spoken to through sockets in a folder: nobody else can take their place.

Jupyter looks for free TCP ports, closes them, and tells the kernel which they were. Another program, another kernel among
them, may have them by then; the kernel dies of it, and with it all cells of a notebook.
"""

import tempfile
import uuid

import nbval.kernel
from jupyter_client.manager import KernelManager

_folder = tempfile.TemporaryDirectory(prefix="kernels-")


class LocalKernelManager(KernelManager):
    def _transport_default(self) -> str:
        return "ipc"

    def _ip_default(self) -> str:
        return f"{_folder.name}/{uuid.uuid4().hex}"


nbval.kernel.KernelManager = LocalKernelManager
