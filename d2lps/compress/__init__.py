"""Sending less: codecs, what they lose and how it is made up for, and all-reduces of what they send.

>>> import torch
>>> from d2lps import compress
>>> codec = compress.top_k(0.25)                        # also half, bfloat16, fp8, int8, int4, one_bit, random_k, power_sgd
>>> sent = codec.encode(torch.tensor([1.0, -4.0, 0.0, 2.0]))
>>> codec.decode(sent, like=torch.empty(4))
tensor([ 0., -4.,  0.,  0.])

A codec is a pure function of the tensor and of the turn, and remembers nothing: `ErrorFeedback` does, for those who want it.
`all_reduce` sums tensors of all ranks with a codec; `d2lps.backend.ddp_hook` has unchanged DDP use it, and `kv.compress` the
parameter server.
"""

from d2lps.compress.all_reduce import all_reduce
from d2lps.compress.codec import Codec, ErrorFeedback
from d2lps.compress.few_bits import bfloat16, fp8, half, int4, int8, one_bit
from d2lps.compress.power_sgd import power_sgd
from d2lps.compress.sparse import random_k, top_k

__all__ = ["Codec", "ErrorFeedback", "all_reduce", "bfloat16", "fp8", "half", "int4", "int8", "one_bit", "power_sgd"]
__all__ += ["random_k", "top_k"]
