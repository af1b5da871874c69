"""The accelerator's side of asynchronous staging: copies on streams of their own, after what was queued before them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def devices_of(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return the accelerators with streams among devices, each once. Copies from other devices are not asynchronous."""
    accelerator = torch.accelerator.current_accelerator()
    kind = None if accelerator is None or accelerator.type == "mps" else accelerator.type  # mps has one stream alone
    return [device for device in dict.fromkeys(devices) if device.type == kind]


class Moment:
    """What the calling thread has queued on its current streams so far, and the device that is current for it."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.events = {device: torch.accelerator.current_stream(device).record_event() for device in devices}
        self.device_index = torch.accelerator.current_device_index() if self.events else 0


class SideStreams:
    """One stream for each accelerator, beside those that computations run on."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    @contextmanager
    def after(self, moment: Moment) -> Iterator[None]:
        """Make the side streams current for this thread. They wait for what was queued at the given moment."""
        if not moment.events:
            yield
            return
        torch.accelerator.set_device_index(moment.device_index)  # pragma: no cover - where there is an accelerator
        with ExitStack() as stack:  # pragma: no cover - where there is an accelerator
            for device, event in moment.events.items():
                stream = self._streams.setdefault(device, torch.Stream(device=device))
                stream.wait_event(event)
                stack.enter_context(stream)
            yield


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for this thread's current stream on each device."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()  # pragma: no cover - where there is an accelerator
