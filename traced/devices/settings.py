"""The settings of devices: ``[devices]``."""

from typing import Annotated

from pydantic import AfterValidator, Field

from traced.devices.hours import valid_windows, valid_zone
from traced.section import Section, Share

Hours = Annotated[str, AfterValidator(valid_windows)]
Zone = Annotated[str, AfterValidator(valid_zone)]


class DevicesSection(Section):
    """When a device is idle, so that training may begin on it; serving asks for it back at any time."""

    train_on: str = Field(
        default="cpu",
        description='what training leases: "cpu", where it computes as yet; "cuda", a GPU\'s UUID, "auto" (GPUs first)',
    )
    idle_s: float = Field(default=60.0, ge=0, description="seconds for which everything below has to hold")
    poll_s: float = Field(default=5.0, gt=0, description="seconds between two looks, and between two heartbeats")
    busy_s: float = Field(default=30.0, ge=0, description="seconds of foreign load after which training gives way")
    yield_s: float = Field(
        default=300.0,
        ge=0,
        description="seconds for training to reach a checkpoint when it gives way; then it is stopped",
    )
    gpu_utilisation: Share = Field(default=0.10, description="greatest utilisation of an idle GPU")
    gpu_memory: Share = Field(default=0.10, description="greatest share of an idle GPU's memory in use, by anyone")
    gpu_foreign: int = Field(default=0, ge=0, description="processes of others that an idle GPU may have")
    cpu_utilisation: Share = Field(default=0.25, description="greatest share of all cores that others use")
    cpu_memory: Share = Field(default=0.80, description="greatest share of the machine's memory in use, by anyone")
    train_hours: Hours = Field(
        default="", description='local hours in which training may begin, "22:00-06:00, 12:30-13:30"; "" is always'
    )
    quiet_hours: Hours = Field(default="", description="local hours in which training neither begins nor goes on")
    time_zone: Zone = Field(default="", description='of these hours, e.g. "Europe/Berlin"; "" is the machine\'s')
    lease_ttl_s: float = Field(
        default=120.0, ge=1, description="seconds without a heartbeat after which a device's lease lapses"
    )
