"""GPU memory at addresses that never move: reserved once, backed by extents that come and go.

Graphs, views and block tables hold addresses. Here an address stays what it is while the memory behind it is given back
to the card and taken again, which costs microseconds and synchronizes nothing. A page that is not backed must not be
touched: that is a fault no process survives.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from cuda.bindings import driver
from torch import Tensor

from surefoot.config import MIB

EXTENT = 64 * MIB
"""Bytes that are mapped and given back as one; a multiple of the driver's 2 MiB."""


class GpuRange:
    """`size` bytes of addresses on one device, none backed at first."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # the driver's calls below need the context that torch made
        self._device = device
        self._extents = -(-size // EXTENT)
        self._base = int(_call(driver.cuMemAddressReserve(self._extents * EXTENT, 0, 0, 0)))
        self._backed: set[int] = set()
        storage = torch._C._construct_storage_from_data_pointer(self._base, device, self._extents * EXTENT)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    @property
    def backed(self) -> int:
        """Bytes of memory that are held."""
        return len(self._backed) * EXTENT

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All of the range under another shape; only backed parts may be touched."""
        return self._bytes[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def hold(self, parts: Iterable[tuple[int, int]]) -> None:
        """Back exactly the extents that meet the byte ranges `parts`; what is new is zero.

        All or nothing: raises torch.OutOfMemoryError where the card refuses, and then holds what it held before.
        Waits for the device before anything is given back.
        """
        wanted = {at for begin, end in parts for at in range(begin // EXTENT, -(-end // EXTENT))}
        added = sorted(wanted - self._backed)
        with ExitStack() as undo:
            for at in added:
                self._map(at)
                undo.callback(self._unmap, [at])
            undo.pop_all()
        for at in added:
            self._bytes[at * EXTENT : (at + 1) * EXTENT].zero_()
        if self._backed - wanted:
            torch.cuda.synchronize(self._device)
        self._unmap(self._backed - wanted)
        self._backed = wanted

    def _map(self, at: int) -> None:
        address = self._base + at * EXTENT
        handle = _call(driver.cuMemCreate(EXTENT, self._properties(), 0))
        with ExitStack() as release:
            release.callback(lambda: _call(driver.cuMemRelease(handle)))  # from then on the mapping keeps it alive
            _call(driver.cuMemMap(address, EXTENT, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._properties().location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as undo:
            undo.callback(self._unmap, [at])
            _call(driver.cuMemSetAccess(address, EXTENT, [access], 1))
            undo.pop_all()

    def _unmap(self, extents: Iterable[int]) -> None:
        for at in extents:
            _call(driver.cuMemUnmap(self._base + at * EXTENT, EXTENT))

    def _properties(self) -> driver.CUmemAllocationProp:
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._device.index or 0
        return properties


def _call(answer: tuple[object, ...]) -> int:
    """What a call to the driver returned besides its status. Raises torch.OutOfMemoryError or RuntimeError."""
    status, *values = answer
    if status == driver.CUresult.CUDA_SUCCESS:
        return values[0] if values else 0  # type: ignore[return-value]
    name = getattr(status, "name", status)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: the driver refused an extent of {EXTENT // MIB} MiB.")
    raise RuntimeError(f"CUDA's driver answered {name} to a call about virtual memory.")
