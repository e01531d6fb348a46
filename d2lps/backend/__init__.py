"""PyTorch on the book's own collectives: DDP, FSDP and DTensor train on the algorithms of `d2lps.collectives`.

>>> import d2lps, torch.distributed as dist                             # doctest: +SKIP
>>> dist.init_process_group("d2lps")                                    # doctest: +SKIP
>>> d2lps.backend.use(all_reduce="ring")        # by name, or a function that you wrote     # doctest: +SKIP

A call of torch.distributed (`operations`) becomes a task. One thread for each process group takes the tasks one after another
(`tasks`), so that DDP sums gradients while backward computes others, and all ranks do the same in the same order, also what
callbacks call; what the program holds meanwhile is a `work`. A task runs a collective on a communicator (`transports`): on
memory that all ranks share if they all live on one machine, else on gloo's sockets; between GPUs, on NCCL. Who started
the processes does not matter. Tensors of a GPU that several ranks share have been tried (`tests/test_gpu.py`); NCCL between GPUs
has not.
"""

from d2lps.backend.choice import use
from d2lps.backend.hooks import ddp_hook
from d2lps.backend.processgroup import group

__all__ = ["ddp_hook", "group", "use"]
