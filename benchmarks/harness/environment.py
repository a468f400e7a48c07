"""Where a result was measured: device, driver, versions, clocks, command, commit. No host names, no paths."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys

import torch

import flashmhf

PACKAGES = ("torch", "triton", "liger-kernel", "transformers")
_FIELDS = {
    "driver_version": "driver", "power.limit": "power_limit_w", "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz",
    "clocks.max.sm": "sm_max_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c",
}  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sensors(device: torch.device) -> dict[str, object]:
    """Clocks, power and temperature now, from nvidia-smi; {"missing": reason} if nvidia-smi gives none."""
    if device.type != "cuda":
        return {"missing": "no CUDA device"}
    if shutil.which("nvidia-smi") is None:
        return {"missing": "nvidia-smi is not installed"}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    for selection in ([f"--id=GPU-{uuid}"], []):  # some drivers do not accept this form of the id
        query = ["nvidia-smi", *selection, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError) as error:
            return {"missing": f"nvidia-smi: {type(error).__name__}"}
        if done.returncode == 0 and done.stdout.strip():
            values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
            return {name: _number(value) for name, value in zip(_FIELDS.values(), values, strict=True)}
    return {"missing": "nvidia-smi failed"}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def short_device(name: str) -> str:
    """The device's name as records' file names have it: h100, h200, cpu."""
    found = re.search(r"[A-Z]+\d+\w*", name.replace("NVIDIA ", ""))
    return "cpu" if "CPU" in name else (found[0] if found else name.replace(" ", "_")).lower()


def command(arguments: list[str] | None = None) -> str:
    """The command line of this process, with absolute paths cut to their last part."""
    script, *rest = sys.argv if arguments is None else arguments
    path = pathlib.Path(script)
    if path.name == "__main__.py":
        words = [path.parent.name]
    elif path.parent.name == "benchmarks":
        words = ["python", "-m", f"benchmarks.{path.stem}"]
    elif path.name in ("flashmhf", "pytest"):
        words = [path.name]
    else:
        words = ["python", f"{path.parent.name}/{path.name}" if path.is_absolute() else script]
    return shlex.join([*words, *(pathlib.Path(word).name if word.startswith("/") else word for word in rest)])


def commit() -> str | None:
    """The commit, with "+" for uncommitted changes; without a repository $FLASHMHF_COMMIT, or None."""
    root = pathlib.Path(flashmhf.__file__).parents[1]
    if not (root / ".git").exists():
        return os.environ.get("FLASHMHF_COMMIT")
    try:
        done = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--dirty=+"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def describe(device: torch.device) -> dict[str, object]:
    """Device, versions, date, commit and command of a run."""
    record: dict[str, object] = {
        "command": command(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "flashmhf": flashmhf.__version__,
        "cuda": torch.version.cuda,
        "back_ends": {name: reason or "usable" for name, reason in flashmhf.info().reasons.items()},
        "packages": {package: _version(package) for package in PACKAGES},
    }
    if device.type != "cuda":
        return record | {"device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads", "capability": None}
    properties = torch.cuda.get_device_properties(device)
    return record | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }


def brief(error: BaseException) -> str:
    """Type and first line of an error, without the folders of any path in it."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"(?:/[\w.+-]+)+/", "", f"{type(error).__name__}: {lines[0]}")[:300]
