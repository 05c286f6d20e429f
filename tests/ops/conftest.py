"""Triton kernels run in Triton's interpreter here: the switch is read when a kernel is defined."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("triton") is None:  # it exists for Linux on x86-64 only
    collect_ignore_glob = ["test_*_triton.py"]
else:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_scalars_too(tensor: Any, scope: Any) -> None:
        """The interpreter holds scalars as arrays of one element, which NumPy 2.4 no longer turns into an index."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_scalars_too
