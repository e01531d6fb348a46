"""The store itself, pure: no sockets, no files, no clock. A client and a server, and what they say to each other."""

from d2lps.kvstore.core import operations as operations  # which fill the table, for whoever makes a Server
