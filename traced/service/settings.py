"""The settings of the control API: ``[api]``."""

from pydantic import Field

from traced.section import Section


class ApiSection(Section):
    """The control API; the Unix socket in the data directory is always there, for the daemon's own user."""

    host: str = Field(default="127.0.0.1", description="address to listen on, if a port is given")
    port: int = Field(default=0, ge=0, le=65535, description="TCP port; 0 is none. A token is needed for it")
    operator_token_file: str = Field(default="", description="file that holds the token of those who may decide")
    read_token_file: str = Field(default="", description="file that holds the token of those who may only look")
