"""Where the layers of a model are computed: on which devices, and how many of them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Placement:
    """`offloaded` of `layers` layers are on `devices`, the others on the CPU.

    The output counts as a layer, and is the first to be offloaded; the others hold KV cells.
    """

    layers: int
    offloaded: int = 0
    devices: str = ""

    @classmethod
    def of(cls, blocks: int, devices: Sequence[str], gpu_layers: int) -> Placement:
        """Return where llama.cpp puts a model of so many `blocks` if told `gpu_layers` (-1: all).

        `devices` are those that layers can be offloaded to.
        """
        layers = blocks + 1
        if not devices or gpu_layers == 0:
            return cls(layers)
        offloaded = layers if gpu_layers < 0 else min(gpu_layers, layers)
        return cls(layers, offloaded, ", ".join(devices))

    @property
    def on_gpu(self) -> bool:
        return self.offloaded > 0

    @property
    def all_on_gpu(self) -> bool:
        return self.offloaded == self.layers

    @property
    def attends_on_gpu(self) -> bool:
        """Whether a device computes attention, and so keeps KV cells."""
        return self.offloaded > 1

    @property
    def host_share(self) -> float:
        """Which part of the KV cells lies in the machine's memory."""
        blocks = self.layers - 1
        return (blocks - max(0, self.offloaded - 1)) / blocks if blocks else 1.0

    def __str__(self) -> str:
        """Say it for people; empty where all is computed by the CPU."""
        if not self.on_gpu:
            return ""
        if self.all_on_gpu:
            return self.devices
        return f"{self.devices} ({self.offloaded} of {self.layers} layers)"
