"""The two-way table between our arrays and the tensors on disk.

A family lists wires with `{}` where the number of the layer stands; loading and saving walk the same list.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = "score.weight"


@dataclass(frozen=True)
class Wire:
    """Our `path` and their `tensor`. With `{}` in the tensor's name, the array has a leading axis of layers."""

    path: str
    tensor: str

    def tensors(self, num_layers: int) -> list[str]:
        """The names on disk, in the order of the leading axis; one name for an array that has none."""
        if "{}" not in self.tensor:
            return [self.tensor]
        return [self.tensor.format(layer) for layer in range(num_layers)]

    @property
    def stacked(self) -> bool:
        return "{}" in self.tensor
