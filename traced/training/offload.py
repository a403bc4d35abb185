"""The frozen weights of a base model in host memory while an engine on the same device samples.

vLLM sleeps during an update, and between two updates the trainer gives the memory of the base back. So a base that
fills most of a GPU can be served and trained on that one GPU; the host needs memory for one more copy of it. The
adapter and its optimizer state stay on the device.

Not covered: a base that is split over several processes.
"""

from typing import Any


class OffloadedBase:
    """The frozen weights of ``model``; they are where they were until ``to_host`` is called.

    The copy in host memory is made once, because nothing changes these weights: ``to_host`` copies nothing.
    """

    def __init__(self, model: Any) -> None:
        frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        self._weights = [(weight, weight.device, weight.detach().to("cpu", copy=True)) for weight in frozen]

    def to_host(self) -> None:
        """Free the memory that the weights take on their device, once the allocator's cache is cleared."""
        for weight, _, in_host_memory in self._weights:
            weight.data = in_host_memory

    def to_device(self) -> None:
        """Copy the weights to their device."""
        for weight, device, in_host_memory in self._weights:
            weight.data = in_host_memory.to(device, copy=True)
