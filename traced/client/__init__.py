"""The control API's client: what the command line and the terminal interface speak to the daemon with."""

from traced.client.client import Client, default_socket
from traced.client.errors import ClientError, NoDaemon, Refused

__all__ = ["Client", "ClientError", "NoDaemon", "Refused", "default_socket"]
