"""The store itself, pure: no sockets, no files, no clock. A client and a server, and what they say to each other."""
