"""Sockets and shared memory: what carries a client's requests to a server, and its answers back."""
