"""The same clients and servers in virtual time."""
