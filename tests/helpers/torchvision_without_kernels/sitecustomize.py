"""Let PyPI's torchvision be imported beside a CPU build of torch.

Its compiled operators need CUDA's libraries. Without them the import fails at two declarations, of
operators for boxes; what prepares pictures is Python. Python imports this module as it starts.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

LIBRARIES = []
"""Keeps the declarations, which end with their library."""


class Declared(MetaPathFinder):
    """Declares the two operators before torchvision is imported."""

    def find_spec(self, name, *_):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        LIBRARIES.append(library)
        return find_spec(name)


sys.meta_path.insert(0, Declared())
