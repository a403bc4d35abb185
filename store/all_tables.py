"""Every table there is: the evidence, the running service, the router."""

from store import service_tables as service_tables
from store import serving_tables as serving_tables
from store.tables import Row

METADATA = Row.metadata
