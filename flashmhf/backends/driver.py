"""The CUDA driver's interface, where neither PyTorch nor Triton has a function for what is needed."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def version() -> int:
    """Return the newest CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver."""
    number = ctypes.c_int(0)
    try:
        _library().cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return 0
    return number.value


def make_context_current(index: int) -> None:
    """Make the primary context of CUDA device ``index`` current in the calling thread, unless one of that device is.

    A thread that has not used CUDA is on device 0 without a context, ``torch.cuda.device`` then does nothing, and the
    driver refuses to encode a tensor map or to load a kernel (error 201). The reference is kept until the process ends.
    """
    driver = _library()
    wanted, current = ctypes.c_int(), ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(wanted), index), "cuDeviceGet")
    if driver.cuCtxGetDevice(ctypes.byref(current)) == 0 and current.value == wanted.value:
        return
    context = ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), wanted), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def _check(error: int, function: str) -> None:
    if error:
        raise RuntimeError(f"{function} failed with CUDA error {error}")
