"""Every table there is: the evidence, what agents said of it, the running service, the router."""

from store import agent_tables as agent_tables
from store import service_tables as service_tables
from store import serving_tables as serving_tables
from store.tables import Row

METADATA = Row.metadata
