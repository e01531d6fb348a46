"""The time of one push and one pull of n bytes by every worker of a parameter server."""

from d2lps.cost.numbers import check


def one_server(nbytes: float, workers: int, alpha: float, beta: float) -> float:
    """2 alpha + 2 m n beta: the server's one port carries everything, O(m).

    >>> one_server(160e6, workers=4, alpha=0, beta=1 / 16e9)
    0.08

    First all push, then all pull. Source: Zhang et al., Dive into Deep Learning, "Parameter Servers".
    """
    return parameter_servers(nbytes, workers, 1, alpha, beta)


def parameter_servers(nbytes: float, workers: int, servers: int, alpha: float, beta: float) -> float:
    """2 alpha + max(2 n, 2 m n / s) beta: each server has n/s bytes of the parameters, O(m/s), until workers' ports are full.

    >>> [parameter_servers(160e6, 4, servers, alpha=0, beta=1 / 16e9) for servers in (1, 2, 4, 8)]
    [0.08, 0.04, 0.02, 0.02]

    Source: Zhang et al., Dive into Deep Learning, "Parameter Servers".
    """
    check(nbytes, workers, alpha, beta)
    check(nbytes, servers, alpha, beta)
    return 2 * alpha + max(1.0, workers / servers) * 2 * nbytes * beta


def colocated_servers(nbytes: float, machines: int, alpha: float, beta: float) -> float:
    """2 alpha + 2(m - 1)/m n beta: every machine is a worker and a server of 1/m; its own part stays at home.

    >>> round(colocated_servers(160e6, machines=4, alpha=0, beta=1 / 16e9), 6)
    0.015

    That is the blockwise all-reduce. Source: derived; Jiang et al. 2020.
    """
    check(nbytes, machines, alpha, beta)
    return 2 * alpha * (machines > 1) + 2 * (machines - 1) / machines * nbytes * beta


def byteps(nbytes: float, gpu_machines: int, cpu_machines: int, beta: float) -> float:
    """2 n (n - 1) M / ((n^2 + k n - 2 k) B), for M bytes, n machines with GPUs and k <= n without, of bandwidth B = 1/beta.

    Push and pull at the same time over full duplex, the parts spread over all machines as serves both kinds best.
    k = 0 is all-reduce, 2(n - 1)/n M/B; k = n is M/B.

    >>> [round(byteps(160e6, 4, k, beta=1 / 16e9), 6) for k in (0, 4)]
    [0.015, 0.01]

    Source: Jiang et al., OSDI 2020 (BytePS), section 4.
    """
    check(nbytes, gpu_machines, 0.0, beta)
    n, k = gpu_machines, cpu_machines
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= n:
        raise ValueError(f"cpu_machines={k!r} is not a whole number from 0 to gpu_machines={n}")
    return 2 * n * (n - 1) * nbytes * beta / (n * n + k * n - 2 * k) if n > 1 else nbytes * beta * bool(k)
