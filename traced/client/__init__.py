"""The control API's client: what the command line and the terminal interface speak to the daemon with."""

from traced.client.client import Client
from traced.client.transport import ClientError, NoDaemon, RequestRefused
from traced.core.location import default_socket

__all__ = ["Client", "ClientError", "NoDaemon", "RequestRefused", "default_socket"]
