"""Client of the control API, which the command line and the terminal interface use."""

from traced.client.client import Client
from traced.client.transport import ClientError, NoDaemon, RequestRefused
from traced.core.location import default_socket

__all__ = ["Client", "ClientError", "NoDaemon", "RequestRefused", "default_socket"]
