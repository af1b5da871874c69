"""What needs an accelerator to mean something, written so that it also runs without one: `make gpu` runs all of it."""

from typing import Final

import torch

#: Where the tensors of these tests lie.
DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Whether there is page-locked memory.
PINS: Final = DEVICE.type == "cuda"
