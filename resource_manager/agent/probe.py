"""Probe of a server's GPUs: prints one report as a line of JSON. Standard library only, Python 3.9 or newer.

This file is sent to `python3 -` on a server, or run as a process of its own, so that a management library
that crashes or hangs ends the probe and nothing else. It reads, in this order, what the server has: NVIDIA's
library NVML (`libnvidia-ml.so.1`, or the path in GPU_MANAGER_NVML), `nvidia-smi`, `amd-smi`, `rocm-smi`,
`npu-smi`. What a library or tool cannot say is None, never 0; if nothing can be said of the GPUs, `error` is
the reason. With `--loop` it prints a report for each line that it reads, and then also knows which XIDs came;
a line `jobs` asks for the jobs of the whole machine, too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pwd
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

TYPE_CHECKING = False  # as in typing, whose import takes a tenth of the probe's time
if TYPE_CHECKING:
    from typing import Any

FORMAT = 1
TOOL_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 20.0
MAX_COMMAND = 200
MAX_TEXT = 255
MAX_LEASE_ID = 1024
MAX_PROCESSES_OF_GPU = 4096
MAX_XIDS_OF_GPU = 256
MAX_ERROR = 500
MAX_REPORT_BYTES = 8 * 1024 * 1024
MAX_ANCESTORS = 64
MAX_JOBS = 4096
JOBS_TIMEOUT_S = 5.0
MIB = 1024 * 1024

Gpu = dict[str, "Any"]
Xid = tuple["str | None", int, float]
"""PCI address, number, and time in seconds since 1970."""

PLAUSIBLE = {"utilization_percent": (0, 100), "temperature_c": (-273, 1000), "power_w": (0, 1e6)}
"""Least and greatest value of a measurement; some devices give the largest integer where they cannot say."""

EMPTY_MIG = "mig without devices"
"""State of a GPU in MIG mode that nobody has divided: nothing can run on it."""


class ProbeError(Exception):
    """Reason why there is no report of this server."""


UNKNOWN_FIELDS = (
    *("uuid", "memory_mib", "memory_used_mib", "utilization_percent", "temperature_c", "power_w"),
    *("energy_mj", "ecc_uncorrected", "rows_pending", "rows_failed", "pages_pending", "throttle_reasons"),
    *("recovery_action", "xids", "pci", "numa_node", "nvlink_group", "mig", "vendor_state", "processes"),
)


def gpu_of(index: int | None, **known: Any) -> Gpu:
    """Return the report of a GPU, in which everything that is not given is unknown."""
    unknown: Gpu = dict.fromkeys(UNKNOWN_FIELDS)
    return {"index": index, "type": "", "vendor": "nvidia", "lost": False, **unknown, **known}


# ---- NVML: names, structs and numbers are those of NVIDIA's nvml.h ----

SUCCESS, INSUFFICIENT_SIZE, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH = 0, 7, 15, 16, 18
XID_EVENT = 0x8
RECOVERY_ACTION_EVENT = 0x8000
RECOVERY_ACTION_FIELD = 230
MAX_NVLINKS = 36
NUMA_WORDS = 16

RECOVERY_ACTIONS = (
    "none",
    "gpu reset",
    "node reboot",
    "drain p2p",
    "drain and reset",
    "recover imex domain",
    "bus reset",
    "system reboot",
)

THROTTLE_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
}
"""Reasons that slow a GPU down; idle clocks and clocks that somebody set are none."""

HOW_TO_MEND = {
    VERSION_MISMATCH: "the driver was updated: reboot the server or reload the nvidia kernel modules",
    9: "load the nvidia kernel modules or reboot the server",
}


class PciInfo(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint * 2),
        ("address", ctypes.c_char * 32),
    ]


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class MemoryV2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class ProcessV1(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)]


class Process(ProcessV1):
    _fields_ = [("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


class Attributes(ctypes.Structure):
    _fields_ = [
        ("units", ctypes.c_uint * 6),
        ("gpu_slices", ctypes.c_uint),
        ("compute_slices", ctypes.c_uint),
        ("memory_mib", ctypes.c_ulonglong),
    ]


class FieldValue(ctypes.Structure):
    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("code", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    ]


class EventData(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


OUT_OF_USE: dict[int, Gpu] = {GPU_IS_LOST: {"lost": True}, RESET_REQUIRED: {"recovery_action": "gpu reset"}}
"""Code of NVML's answer to any question about a GPU -> what it says of the GPU."""

OUT_OF_USE_IN_WORDS = {"is lost": OUT_OF_USE[GPU_IS_LOST], "requires reset": OUT_OF_USE[RESET_REQUIRED]}
"""The same by what `nvidia-smi` writes in the place of a value, such as `[GPU is lost]`."""


class OutOfUseError(Exception):
    """GPU that has fallen off the bus, or answers nothing before it is reset; has NVML's code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def take_out_of_use(gpu: Gpu, code: int) -> None:
    """Note what this code of NVML's says of a GPU, unless a graver recovery action is known."""
    for name, value in OUT_OF_USE[code].items():
        if gpu[name] in (None, False, "none"):
            gpu[name] = value


class Nvml:
    """NVML, opened; raises `OSError` if there is no such library, `ProbeError` if it does not work."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._check("nvmlInit_v2")
        self._events: ctypes.c_void_p | None = None
        self._pci_of: dict[int | None, str | None] = {}
        self._seen: dict[int, Gpu] = {}

    def _check(self, name: str, *arguments: Any) -> None:
        """Call a function that must work."""
        function = getattr(self._library, name, None)
        code = function(*arguments) if function is not None else 13
        if code != SUCCESS:
            raise ProbeError(f"{name} of NVML: {self._text_of(code)}")

    def _text_of(self, code: int) -> str:
        text = getattr(self._library, "nvmlErrorString", None)
        if text is None:
            return f"error {code}"
        text.restype = ctypes.c_char_p
        said = (text(code) or b"").decode("utf-8", "replace")
        return f"{said} (error {code}){': ' + HOW_TO_MEND[code] if code in HOW_TO_MEND else ''}"

    def _call(self, name: str, *arguments: Any) -> bool:
        """Return whether the function wrote an answer; it did not if the library or the GPU lacks it."""
        function = getattr(self._library, name, None)
        code = function(*arguments) if function is not None else None
        if code in OUT_OF_USE:
            raise OutOfUseError(code)
        return code == SUCCESS

    def _read(self, name: str, device: ctypes.c_void_p, kind: Any, *arguments: Any) -> Any:
        """Return what the function writes to its last argument, of ctypes type `kind`, or None."""
        found = kind()
        return found if self._call(name, device, *arguments, ctypes.byref(found)) else None

    def _number(
        self, name: str, device: ctypes.c_void_p, *arguments: Any, kind: Any = ctypes.c_uint
    ) -> int | None:
        found = self._read(name, device, kind, *arguments)
        return None if found is None else found.value

    def _text(self, name: str, *device: ctypes.c_void_p) -> str | None:
        buffer = ctypes.create_string_buffer(128)
        return buffer.value.decode("utf-8", "replace") if self._call(name, *device, buffer, 128) else None

    def driver(self) -> str | None:
        return self._text("nvmlSystemGetDriverVersion")

    def _devices(self) -> Iterator[tuple[int, int, ctypes.c_void_p]]:
        """Yield the number of each GPU, the code of NVML's answer to it, and its handle."""
        count = ctypes.c_uint()
        self._check("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for number in range(count.value):
            device = ctypes.c_void_p()
            yield number, self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)), device

    def gpus(self) -> list[Gpu]:
        """Return the reports of all GPUs, MIG devices in place of the GPU that is divided into them."""
        found: list[Gpu] = []
        links: dict[int, tuple[str, set[str]]] = {}
        for number, code, device in self._devices():
            if code == SUCCESS:
                whole, connected = self._whole(device, number)
                self._seen[number] = {name: whole[name] for name in ("uuid", "type", "pci", "numa_node")}
                migs = self._migs(device, whole)
                if whole["pci"] is not None and not migs:
                    links[len(found)] = (whole["pci"], connected)
                found += migs or [whole]
            elif code in OUT_OF_USE:
                found.append(gpu_of(number, **OUT_OF_USE[code], **self._seen.get(number, {})))
            else:
                found.append(gpu_of(number, vendor_state=self._text_of(code)))
        for place, gpu in enumerate(found):
            gpu["index"] = place  # MIG devices count one by one
        for place, group in nvlink_groups(links).items():
            found[place]["nvlink_group"] = group
        return found

    def _whole(self, device: ctypes.c_void_p, number: int) -> tuple[Gpu, set[str]]:
        """Return the report of a GPU and what its NVLinks connect it to."""
        gpu = gpu_of(number)
        connected: set[str] = set()
        try:
            gpu["uuid"] = self._text("nvmlDeviceGetUUID", device)
            gpu["type"] = plain_type(self._text("nvmlDeviceGetName", device))
            gpu["pci"] = self._pci(device)
            gpu["numa_node"] = self._numa_node(device, gpu["pci"])
            gpu["memory_mib"], gpu["memory_used_mib"] = self._memory(device)
            utilization = self._read("nvmlDeviceGetUtilizationRates", device, Utilization)
            gpu["utilization_percent"] = None if utilization is None else utilization.gpu
            gpu["temperature_c"] = self._number("nvmlDeviceGetTemperature", device, 0)
            power = self._number("nvmlDeviceGetPowerUsage", device)
            gpu["power_w"] = None if power is None else power / 1000
            gpu["energy_mj"] = self._number(
                "nvmlDeviceGetTotalEnergyConsumption", device, kind=ctypes.c_ulonglong
            )
            gpu["ecc_uncorrected"] = self._number(
                "nvmlDeviceGetTotalEccErrors", device, 1, 0, kind=ctypes.c_ulonglong
            )
            gpu["rows_pending"], gpu["rows_failed"] = self._rows(device)
            pending = self._number("nvmlDeviceGetRetiredPagesPendingStatus", device)
            gpu["pages_pending"] = None if pending is None else bool(pending)
            gpu["throttle_reasons"] = self._throttle_reasons(device)
            gpu["recovery_action"] = self._recovery_action(device)
            gpu["processes"] = self._processes(device)
            connected = self._nvlinks(device)
        except OutOfUseError as error:
            take_out_of_use(gpu, error.code)
        return gpu, connected

    def _migs(self, device: ctypes.c_void_p, whole: Gpu) -> list[Gpu]:
        """Return the reports of the MIG devices of a GPU: its health is theirs, its measurements are not."""
        found: list[Gpu] = []
        try:
            current, pending = ctypes.c_uint(), ctypes.c_uint()
            modes = ctypes.byref(current), ctypes.byref(pending)
            if not self._call("nvmlDeviceGetMigMode", device, *modes) or not current.value:
                return []
            whole["vendor_state"] = EMPTY_MIG
            for number in range(self._number("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
                mig = self._read("nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_void_p, number)
                if mig is None:
                    continue
                profile = self._profile(mig)
                total, used = self._memory(mig)
                utilization = self._read("nvmlDeviceGetUtilizationRates", mig, Utilization)
                found.append(
                    {
                        **whole,
                        "vendor_state": None,
                        "uuid": self._text("nvmlDeviceGetUUID", mig),
                        "type": f"{whole['type']}:{profile}",
                        "mig": profile,
                        "memory_mib": total,
                        "memory_used_mib": used,
                        "utilization_percent": None if utilization is None else utilization.gpu,
                        "power_w": None,
                        "energy_mj": None,
                        "processes": self._processes(mig),
                    }
                )
        except OutOfUseError as error:
            take_out_of_use(whole, error.code)
            return []
        return found

    def _profile(self, mig: ctypes.c_void_p) -> str:
        """Return the profile of a MIG device as in its name, such as 1g.10gb, or by its slices."""
        name = self._text("nvmlDeviceGetName", mig) or ""
        if " MIG " in name:
            return name.rpartition(" MIG ")[2]
        slices = self._read("nvmlDeviceGetAttributes_v2", mig, Attributes)
        if slices is None:
            return "mig"
        part = "" if slices.compute_slices == slices.gpu_slices else f"{slices.compute_slices}c."
        return f"{part}{slices.gpu_slices}g.{round(slices.memory_mib / 1024)}gb"

    def _memory(self, device: ctypes.c_void_p) -> tuple[int | None, int | None]:
        """Return the MiB in total and in use; the second version does not count what the driver reserves."""
        found = MemoryV2()
        found.version = ctypes.sizeof(MemoryV2) | 2 << 24
        if not self._call("nvmlDeviceGetMemoryInfo_v2", device, ctypes.byref(found)):
            found = self._read("nvmlDeviceGetMemoryInfo", device, Memory)
        return (None, None) if found is None else (found.total // MIB, found.used // MIB)

    def _pci(self, device: ctypes.c_void_p) -> str | None:
        found = self._read("nvmlDeviceGetPciInfo_v3", device, PciInfo)
        return None if found is None else plain_pci(found.address.decode("ascii", "replace"))

    def _numa_node(self, device: ctypes.c_void_p, pci: str | None) -> int | None:
        nodes = (ctypes.c_ulong * NUMA_WORDS)()
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        if self._call("nvmlDeviceGetMemoryAffinity", device, NUMA_WORDS, nodes, 0):
            near = [i for i in range(NUMA_WORDS * bits) if nodes[i // bits] >> i % bits & 1]
            if len(near) == 1:
                return near[0]
        return numa_node_of(pci)

    def _rows(self, device: ctypes.c_void_p) -> tuple[bool | None, bool | None]:
        """Return whether a row remap is pending and whether one failed."""
        corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
        done = self._call(
            "nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, (corrected, uncorrected, pending, failed))
        )
        return (bool(pending.value), bool(failed.value)) if done else (None, None)

    def _throttle_reasons(self, device: ctypes.c_void_p) -> list[str] | None:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            reasons = self._number(name, device, kind=ctypes.c_ulonglong)
            if reasons is not None:
                return [text for bit, text in THROTTLE_REASONS.items() if reasons & bit]
        return None

    def _recovery_action(self, device: ctypes.c_void_p) -> str | None:
        asked = FieldValue(field=RECOVERY_ACTION_FIELD)
        done = self._call("nvmlDeviceGetFieldValues", device, 1, ctypes.byref(asked))
        if not done or asked.code != SUCCESS:
            return None
        action = asked.value & 0xFFFFFFFF
        return RECOVERY_ACTIONS[action] if action < len(RECOVERY_ACTIONS) else f"action {action}"

    def _processes(self, device: ctypes.c_void_p) -> list[dict[str, Any]] | None:
        computing = self._running("nvmlDeviceGetComputeRunningProcesses", device)
        under_mps = self._running("nvmlDeviceGetMPSComputeRunningProcesses", device)
        if computing is None:
            return None
        # What only draws is in neither list. Of that jobs alone count, as else every desktop would.
        drawing = self._running("nvmlDeviceGetGraphicsRunningProcesses", device) or []
        computes = {process.pid: process for process in [*computing, *(under_mps or [])]}
        draws = {
            process.pid: process
            for process in drawing
            if process.pid not in computes and owner_of(process.pid)[2] not in ("none", "unreadable")
        }
        return [
            {
                **process_of(pid, None if process.memory == 2**64 - 1 else process.memory // MIB),
                **({"draws": True} if pid in draws else {}),
            }
            for pid, process in sorted({**draws, **computes}.items())[:MAX_PROCESSES_OF_GPU]
            if pid > 0
        ]

    def _running(self, name: str, device: ctypes.c_void_p) -> list[Any] | None:
        versions: tuple[tuple[str, Any], ...] = (("_v3", Process), ("_v2", Process), ("", ProcessV1))
        for version, kind in versions:
            function = getattr(self._library, name + version, None)
            if function is None:
                continue
            size = 0
            for _ in range(5):  # processes may start between two calls
                count = ctypes.c_uint(size)
                listed = (kind * size)()
                code = function(device, ctypes.byref(count), listed if size else None)
                if code == SUCCESS:
                    return list(listed[: count.value])
                if code in OUT_OF_USE:
                    raise OutOfUseError(code)
                if code != INSUFFICIENT_SIZE:
                    break
                size = count.value + 8
        return None

    def _nvlinks(self, device: ctypes.c_void_p) -> set[str]:
        """Return the PCI addresses of the GPUs at the other ends, and "switch" for an NVSwitch."""
        found: set[str] = set()
        for link in range(MAX_NVLINKS):
            active = self._number("nvmlDeviceGetNvLinkState", device, link)
            if active is None:
                break
            if active and self._number("nvmlDeviceGetNvLinkRemoteDeviceType", device, link) == 2:
                found.add("switch")
            elif active:
                remote = self._read("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, PciInfo, link)
                if remote is not None:
                    found.add(plain_pci(remote.address.decode("ascii", "replace")) or "")
        return found

    def watch(self) -> None:
        """Begin to collect the XIDs of every GPU; without such events none will be known."""
        events = ctypes.c_void_p()
        create = getattr(self._library, "nvmlEventSetCreate", None)
        if create is None or create(ctypes.byref(events)) != SUCCESS:
            return
        self._events = events
        for _, code, device in self._devices():
            if code == SUCCESS:
                try:
                    self._pci_of[device.value] = self._pci(device)
                except OutOfUseError:
                    continue
                supported = ctypes.c_ulonglong()
                self._library.nvmlDeviceGetSupportedEventTypes(device, ctypes.byref(supported))
                wanted = supported.value & (XID_EVENT | RECOVERY_ACTION_EVENT)
                self._library.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(wanted), events)

    def new_xids(self) -> list[Xid]:
        """Return (PCI address, XID, time) of the events since the last call."""
        found = []
        data = EventData()
        while (
            self._events is not None
            and self._library.nvmlEventSetWait_v2(self._events, ctypes.byref(data), 0) == SUCCESS
        ):
            if data.type == XID_EVENT:
                found.append((self._pci_of.get(data.device), data.data, time.time()))
        return found


def nvlink_groups(links: dict[int, tuple[str, set[str]]]) -> dict[int, int]:
    """Return place -> number of its group for the GPUs that NVLink connects, directly or through a switch.

    `links` maps a place in the list of GPUs to its PCI address and what `Nvml._nvlinks` found.
    """
    place_of = {pci: place for place, (pci, _) in links.items()}
    joined = [{place for place, (_, connected) in links.items() if "switch" in connected}]
    joined += [
        {place, place_of[pci]}
        for place, (_, connected) in links.items()
        for pci in connected
        if pci in place_of
    ]
    groups: list[set[int]] = []
    for places in joined:
        touched = [group for group in groups if group & places]
        groups = [group for group in groups if group not in touched] + [places.union(*touched)]
    groups = sorted((group for group in groups if len(group) > 1), key=min)
    return {place: number for number, group in enumerate(groups) for place in group}


def plain_type(name: str | None) -> str:
    """Return the name of a GPU without its maker."""
    return re.sub(r"^(NVIDIA|AMD)\s+", "", name or "").strip()


def plain_pci(address: str) -> str | None:
    """Return a PCI address as Linux writes it, such as 0000:07:00.0; NVML writes eight digits of domain."""
    found = re.match(r"^([0-9a-f]+):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$", address.strip().lower())
    return f"{int(found[1], 16):04x}:{found[2]}" if found else None


def numa_node_of(pci: str | None) -> int | None:
    """Return the NUMA node of a PCI address, or None if Linux does not know one."""
    number = read_text(f"/sys/bus/pci/devices/{pci}/numa_node") if pci else None
    return int(number) if number is not None and number.strip().isdigit() else None


# ---- the tools of the makers ----


def run_tool(*command: str) -> str:
    """Return what the tool prints; raises `ProbeError` with the last line of what it says if it fails."""
    import subprocess  # here, as most servers have the library

    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(f"{command[0]}: {error}") from error
    output, complaint = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    if done.returncode != 0:
        said = [line.strip() for line in (complaint + "\n" + output).splitlines() if line.strip()]
        raise ProbeError(f"{command[0]}: {said[-1] if said else f'exit code {done.returncode}'}")
    return output


def number_in(text: object, kind: Any = int) -> Any:
    """Return the number at the beginning of a tool's field, or None for `[N/A]` and the like."""
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", str(text))
    return None if found is None else kind(float(found[1]))


def mib_in(text: object) -> int | None:
    """Return the MiB of a tool's field in bytes, or None."""
    size: int | None = number_in(text)
    return None if size is None else size // MIB


NVIDIA_FIELDS = (
    "index,uuid,name,driver_version,pci.bus_id,memory.total,memory.used,utilization.gpu,temperature.gpu,"
    "power.draw"
)
NEWER_NVIDIA_FIELDS = "ecc.errors.uncorrected.volatile.total,mig.mode.current,clocks_throttle_reasons.active"


def nvidia_smi() -> tuple[str | None, list[Gpu]]:
    """Return the driver's version and the reports of all GPUs by `nvidia-smi`."""
    as_csv = "--format=csv,noheader,nounits"
    names = f"{NVIDIA_FIELDS},{NEWER_NVIDIA_FIELDS}".split(",")
    try:
        text = run_tool("nvidia-smi", f"--query-gpu={','.join(names)}", as_csv)
    except ProbeError as error:
        if "not a valid field" not in str(error):
            raise
        names = NVIDIA_FIELDS.split(",")
        text = run_tool("nvidia-smi", f"--query-gpu={','.join(names)}", as_csv)
    apps = run_tool("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", as_csv)
    try:
        rows = run_tool(
            "nvidia-smi", "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure", as_csv
        )
    except ProbeError:
        rows = ""
    return read_nvidia_smi(names, text, apps, rows, lambda: run_tool("nvidia-smi", "-L"))


def read_nvidia_smi(
    names: Sequence[str], text: str, apps: str, rows: str, list_gpus: Callable[[], str]
) -> tuple[str | None, list[Gpu]]:
    """Return driver and GPUs from the tool's texts; `list_gpus` gives `nvidia-smi -L`, which names MIG."""
    driver = None
    found: list[Gpu] = []
    remapped = {row[0]: row[1:] for row in read_csv(rows) if len(row) == 3}
    for row in read_csv(text):
        if len(row) != len(names):
            continue
        values = dict(zip(names, row))  # noqa: B905 - strict came with Python 3.10
        states = [state for words, state in OUT_OF_USE_IN_WORDS.items() if any(words in cell for cell in row)]
        driver = values["driver_version"] if values["driver_version"][:1] != "[" else driver
        pci = plain_pci(values["pci.bus_id"])
        reasons = values.get("clocks_throttle_reasons.active", "")
        bits = int(reasons, 16) if re.match(r"^0x[0-9a-fA-F]+$", reasons) else None
        pending, failed = (yes_or_no(text) for text in remapped.get(values["uuid"], ("", "")))
        found.append(
            gpu_of(
                number_in(values["index"]),
                uuid=values["uuid"] if re.match("^(GPU|MIG)-", values["uuid"]) else None,
                type=plain_type(values["name"]) if values["name"][:1] != "[" else "",
                pci=pci,
                numa_node=numa_node_of(pci),
                memory_mib=number_in(values["memory.total"]),
                memory_used_mib=number_in(values["memory.used"]),
                utilization_percent=number_in(values["utilization.gpu"]),
                temperature_c=number_in(values["temperature.gpu"]),
                power_w=number_in(values["power.draw"], float),
                ecc_uncorrected=number_in(values.get("ecc.errors.uncorrected.volatile.total")),
                throttle_reasons=None
                if bits is None
                else [text for bit, text in THROTTLE_REASONS.items() if bits & bit],
                rows_pending=pending,
                rows_failed=failed,
                vendor_state=EMPTY_MIG if values.get("mig.mode.current") == "Enabled" else None,
                **(states[0] if states else {}),
            )
        )
    if any(gpu["vendor_state"] for gpu in found):
        found = with_migs(found, list_gpus())
    using = [row for row in read_csv(apps) if len(row) == 3]
    for place, gpu in enumerate(found):
        gpu["index"] = place
        if gpu["lost"] or gpu["recovery_action"]:
            continue  # of its processes nothing is known
        gpu["processes"] = [
            process_of(number_in(pid), number_in(memory))
            for uuid, pid, memory in using
            if uuid == gpu["uuid"] and number_in(pid)
        ]
    return driver, found


def read_csv(text: str) -> list[list[str]]:
    """Return the cells of each line; `nvidia-smi` writes neither quotes nor commas into one."""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def yes_or_no(text: str) -> bool | None:
    """Return the truth of a tool's Yes or No, 1 or 0; None for anything else."""
    return {"yes": True, "1": True, "no": False, "0": False}.get(text.lower())


def with_migs(gpus: list[Gpu], listed: str) -> list[Gpu]:
    """Return the GPUs with MIG devices, as `nvidia-smi -L` lists them, in place of the divided ones."""
    migs: dict[str | None, list[tuple[str, str]]] = {}
    uuid = None
    for line in listed.splitlines():
        of_gpu = re.match(r"^GPU \d+:.*\(UUID: ([^)]+)\)", line)
        of_mig = re.match(r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: ([^)]+)\)", line)
        if of_gpu:
            uuid = of_gpu[1]
        elif of_mig:
            migs.setdefault(uuid, []).append((of_mig[1], of_mig[2]))
    found: list[Gpu] = []
    for gpu in gpus:
        found += [
            {
                **gpu,
                "uuid": of_mig,
                "type": f"{gpu['type']}:{profile}",
                "mig": profile,
                **dict.fromkeys(
                    ("vendor_state", "memory_mib", "memory_used_mib", "utilization_percent", "power_w")
                ),
            }
            for profile, of_mig in migs.get(gpu["uuid"], ())
        ] or [gpu]
    return found


def amd_smi() -> tuple[str | None, list[Gpu]]:
    """Return the driver's version and the reports of all GPUs by `amd-smi`."""
    static, metric, processes = (
        run_tool("amd-smi", name, "--json") for name in ("static", "metric", "process")
    )
    return read_amd_smi(static, metric, processes)


def read_amd_smi(static: str, metric: str, processes: str) -> tuple[str | None, list[Gpu]]:
    """Return driver and GPUs from the tool's JSON: a list of GPUs, since ROCm 7 below `gpu_data`."""
    measured = {gpu.get("gpu"): gpu for gpu in amd_gpus(metric)}
    running = {gpu.get("gpu"): gpu.get("process_list") for gpu in amd_gpus(processes)}
    driver = None
    found: list[Gpu] = []
    for gpu in amd_gpus(static):
        index = gpu.get("gpu")
        values = measured.get(index, {})
        driver = amd_value(gpu, "driver", "version") or driver
        pci = plain_pci(str(amd_value(gpu, "bus", "bdf")))
        temperatures = [amd_value(values, "temperature", place) for place in ("hotspot", "edge")]
        listed = running.get(index)
        found.append(
            gpu_of(
                index,
                vendor="amd",
                uuid=amd_uuid(amd_value(gpu, "asic", "asic_serial")),
                type=plain_type(amd_value(gpu, "asic", "market_name")),
                pci=pci,
                numa_node=numa_node_of(pci)
                if amd_value(gpu, "numa", "node") is None
                else number_in(amd_value(gpu, "numa", "node")),
                memory_mib=number_in(amd_value(gpu, "vram", "size")),
                memory_used_mib=number_in(amd_value(values, "mem_usage", "used_vram")),
                utilization_percent=number_in(amd_value(values, "usage", "gfx_activity")),
                temperature_c=next((number_in(t) for t in temperatures if t is not None), None),
                power_w=number_in(amd_value(values, "power", "socket_power"), float),
                ecc_uncorrected=number_in(amd_value(values, "ecc", "total_uncorrectable_count")),
                processes=None
                if not isinstance(listed, list)
                else [
                    process_of(info["pid"], mib_in(amd_value(info, "memory_usage", "vram_mem")))
                    for info in (entry.get("process_info") for entry in listed)
                    if isinstance(info, dict) and isinstance(info.get("pid"), int)
                ],
            )
        )
    return driver, found


def amd_gpus(text: str) -> list[dict[str, Any]]:
    """Return the GPUs of a JSON text of `amd-smi`."""
    found = json.loads(re.sub(r"^[^\[{]*", "", text))  # warnings may come first
    found = found.get("gpu_data", []) if isinstance(found, dict) else found
    return [gpu for gpu in found if isinstance(gpu, dict)]


def amd_value(gpu: dict[str, Any], section: str, name: str) -> Any:
    """Return a value without its unit; None for N/A and what is missing."""
    found = (gpu.get(section) or {}).get(name) if isinstance(gpu.get(section), dict) else None
    found = found.get("value") if isinstance(found, dict) else found
    return None if found in ("N/A", "", None) else found


def amd_uuid(unique_id: object) -> str | None:
    """Return the name by which ROCm's runtime selects a GPU: GPU- and its unique id in hexadecimal."""
    text = str(unique_id or "").lower()
    digits = text[2:] if text.startswith("0x") else text
    known = re.match(r"^[0-9a-f]{1,16}$", digits) and int(digits, 16)
    return f"GPU-{digits:0>16}" if known else None


def rocm_smi() -> tuple[str | None, list[Gpu]]:
    """Return the driver's version and the reports of all GPUs by `rocm-smi`."""
    wanted = (
        "--showproductname --showuniqueid --showbus --showuse --showtemp --showpower --showdriverversion"
        " --showmeminfo vram --json"
    )
    return read_rocm_smi(run_tool("rocm-smi", *wanted.split()))


def read_rocm_smi(text: str) -> tuple[str | None, list[Gpu]]:
    """Return driver and GPUs from the tool's JSON; it does not say which process uses which GPU."""
    found = json.loads(re.sub(r"^[^{]*", "", text))  # warnings may come first
    gpus = []
    cards = [name for name in found if re.match(r"^card\d+$", name)]
    for card in sorted(cards, key=lambda name: int(name[4:])):
        values = {name.lower(): value for name, value in found[card].items()}  # older ones: "Card series"
        pci = plain_pci(values.get("pci bus", ""))
        temperatures = [values.get(f"temperature (sensor {place}) (c)") for place in ("junction", "edge")]
        power = [values.get(f"{kind} graphics package power (w)") for kind in ("current socket", "average")]
        gpus.append(
            gpu_of(
                int(card[4:]),
                vendor="amd",
                uuid=amd_uuid(values.get("unique id")),
                type=plain_type(values.get("card series") or values.get("device name")),
                pci=pci,
                numa_node=numa_node_of(pci),
                memory_mib=mib_in(values.get("vram total memory (b)")),
                memory_used_mib=mib_in(values.get("vram total used memory (b)")),
                utilization_percent=number_in(values.get("gpu use (%)")),
                temperature_c=next((number_in(t) for t in temperatures if t is not None), None),
                power_w=next((number_in(p, float) for p in power if p is not None), None),
            )
        )
    return (found.get("system") or {}).get("Driver version"), gpus


def npu_smi() -> tuple[str | None, list[Gpu]]:
    """Return the driver's version and the reports of all chips by `npu-smi`."""
    return read_npu_smi(run_tool("npu-smi", "info"))


def read_npu_smi(text: str) -> tuple[str | None, list[Gpu]]:
    """Return driver and chips from the tool's table, which has two lines for a chip; then come processes."""
    version = re.search(r"Version:\s*(\S+)", text)
    devices, _, using = text.partition("Process id")
    pattern = re.compile(
        r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\w+)\s*\|\s*([\d.]+|-|NA)\s+(\d+|-|NA)\s.*\n"
        r"\|\s*(\d+)(?:\s+\d+)?\s*\|\s*(\S+)\s*\|\s*(\d+|-|NA)\s+(.*?)\|",
        re.MULTILINE,
    )
    listed: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for npu, chip, pid, memory in re.findall(
        r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|[^|]*\|\s*(\d*)\s*\|", using, re.MULTILINE
    ):
        listed.setdefault((npu, chip), []).append(process_of(int(pid), number_in(memory)))
    gpus: list[Gpu] = []
    for npu, name, state, power, degrees, chip, bus, busy, memories in pattern.findall(devices):
        pairs = re.findall(r"(\d+)\s*/\s*(\d+)", memories)
        used, total = pairs[-1] if pairs else ("", "")  # the last is HBM where the chip has it
        pci = plain_pci(bus)
        gpus.append(
            gpu_of(
                len(gpus),
                vendor="ascend",
                type=name,
                pci=pci,
                numa_node=numa_node_of(pci),
                memory_mib=number_in(total) or None,
                memory_used_mib=number_in(used),
                utilization_percent=number_in(busy),
                temperature_c=number_in(degrees),
                power_w=number_in(power, float),
                vendor_state=None if state == "OK" else state.lower(),
                processes=listed.get((npu, chip), []) if using else None,
            )
        )
    return (version[1] if version else None), gpus


# ---- processes ----

JOB_KEY = re.compile(r"gpu-[A-Za-z0-9_.-]{0,60}-[0-9a-f]{8}-\d{1,20}(?:\.\d{1,5})?")
"""Name of a lease's job, which the launchers give to its directory, its container, or its cgroup.

That of a gang's member ends in its rank.
"""
REGISTRATION = re.compile(rf"/memfd:({JOB_KEY.pattern}) \(deleted\)")
"""Descriptor of a process that registered itself."""


def process_of(pid: int, memory_mib: int | None) -> dict[str, Any]:
    """Return a process: user, command, and the lease and job it belongs to, as far as this user may read.

    `lease_source` says where lease or job were found (`environment`, `ancestor`, `registration`,
    `cgroup`), or that there is none (`none`), or that it could not be read (`unreadable`).
    """
    try:
        user: str | None = printable(user_name(os.stat(f"/proc/{pid}").st_uid))[:MAX_TEXT]
    except OSError:
        user = None
    command = read_text(f"/proc/{pid}/cmdline")
    lease_id, job, source = owner_of(pid)
    return {
        "pid": pid,
        "user": user,
        "command": None if command is None else printable(command.replace("\0", " ").strip())[:MAX_COMMAND],
        "memory_mib": memory_mib,
        "lease_id": lease_id,
        "job": job,
        "lease_source": source,
    }


def owner_of(pid: int) -> tuple[str | None, str | None, str]:
    """Return lease id, job key and where they were found, of a process or the nearest ancestor with one."""
    readable = True
    ancestor = pid
    for step in range(MAX_ANCESTORS):
        environment = read_text(f"/proc/{ancestor}/environ")
        if environment is None:
            readable = readable and step > 0
        else:
            values = dict(entry.split("=", 1) for entry in environment.split("\0") if "=" in entry)
            lease_id = lease_id_in(values.get("GPU_LEASE_ID", ""))
            lock = os.path.basename(os.path.dirname(values.get("GPU_JOB_LOCK", "")))
            job = lock if JOB_KEY.fullmatch(lock) else None
            if lease_id or job:
                return lease_id, job, "ancestor" if step else "environment"
            job = registered_job(ancestor)
            if job:
                return None, job, "registration"
        status = re.search(r"^PPid:\s*(\d+)", read_text(f"/proc/{ancestor}/status") or "", re.MULTILINE)
        ancestor = int(status[1]) if status else 0
        if ancestor <= 1:
            break
    cgroup = read_text(f"/proc/{pid}/cgroup")
    found = JOB_KEY.search(cgroup or "")
    if found:
        return None, found[0], "cgroup"
    return None, None, "none" if readable else "unreadable"


LOCK = re.compile(rb"(?:\A|\0)GPU_JOB_LOCK=[^\0]*/(" + JOB_KEY.pattern.encode() + rb")/[^/\0]*(?:\Z|\0)")
"""The variable of a job with the path of its lock."""

HELD = re.compile(rf"(?:/memfd:|/)({JOB_KEY.pattern})(?: \(deleted\)|/lock)")
"""Descriptor of a process that registered itself, or that inherited the lock of its job."""


def live_jobs(timeout_s: float = JOBS_TIMEOUT_S) -> dict[str, Any]:
    """Return the keys of the jobs of which this machine has a process, and whether all processes were read.

    Processes that begin meanwhile are read, too, until there is none that was not.
    """
    keys: set[str] = set()
    complete = sees_all_processes()
    give_up_at = time.monotonic() + timeout_s
    known: set[str] = set()
    while pids := {name for name in os.listdir("/proc") if name.isdigit()} - known:
        known |= pids
        for pid in pids:
            if time.monotonic() > give_up_at or len(keys) > MAX_JOBS:
                return {"keys": sorted(keys)[:MAX_JOBS], "complete": False}
            try:
                keys |= jobs_of(pid)
            except (FileNotFoundError, ProcessLookupError):
                pass  # it has ended
            except OSError:
                complete = False
    return {"keys": sorted(keys)[:MAX_JOBS], "complete": complete}


def sees_all_processes() -> bool:
    """Return whether /proc shows the processes of the whole machine: the kernel's own are then there."""
    return (read_text("/proc/2/comm") or "").strip() == "kthreadd"


def jobs_of(pid: str) -> set[str]:
    """Return the keys of jobs in a process's environment, descriptors and cgroup; raises `OSError`."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        found = {key.decode() for key in LOCK.findall(file.read())}
    with open(f"/proc/{pid}/cgroup", errors="replace") as text:
        found.update(JOB_KEY.findall(text.read()))
    found.update(held[1] for held in map(HELD.search, descriptors_of(pid)) if held)
    return found


def descriptors_of(pid: object) -> Iterator[str]:
    """Yield what a process has open; raises `OSError` if that cannot be read."""
    folder = f"/proc/{pid}/fd/"
    for descriptor in os.listdir(folder):
        try:
            yield os.readlink(folder + descriptor)
        except FileNotFoundError:
            continue  # closed meanwhile


def registered_job(pid: int) -> str | None:
    """Return the job as which the process registered itself: the name of a descriptor that it keeps open."""
    try:
        found = next(filter(None, map(REGISTRATION.fullmatch, descriptors_of(pid))), None)
    except OSError:  # it has ended
        return None
    return found[1] if found else None


def lease_id_in(text: str) -> str | None:
    """Return the lease id, unless it is none: any process may write anything into its environment."""
    return text if 0 < len(text) <= MAX_LEASE_ID and printable(text) == text else None


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters and marks that show nothing."""


def printable(text: str) -> str:
    """Return the text with a question mark in place of each character that does not show."""
    return BLANK.sub("?", "".join(char if char.isprintable() else "?" for char in text))


def read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


# ---- the server ----


def kernel_log(path: str = "/dev/kmsg") -> list[str] | None:
    """Return the lines of the kernel's log, or None if this user may not read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        while True:
            try:
                line = os.read(descriptor, 8192)
            except BrokenPipeError:  # the kernel has overwritten this one
                continue
            except OSError:
                break
            if not line:
                break
            lines.append(line.decode("utf-8", "replace"))
    finally:
        os.close(descriptor)
    return lines


def kernel_xids(lines: Iterable[str], boot_time: float) -> list[Xid]:
    """Return (PCI address, XID, time) of each XID in the lines of /dev/kmsg."""
    found = []
    for line in lines:
        xid = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)(?:\.\d)?\): (\d+)", line)
        if xid:
            stamp = re.match(r"^\d+,\d+,(\d+)", line)
            at = boot_time + int(stamp[1]) / 1e6 if stamp else time.time()
            found.append((plain_pci(f"{xid[1]}.0"), int(xid[2]), at))
    return found


def add_xids(gpus: list[Gpu], xids: list[Xid]) -> None:
    """Write the XIDs into the GPUs they are about: each number once, how often, and when it came last."""
    for gpu in gpus:
        if gpu["vendor"] != "nvidia":
            continue
        gpu["xids"] = []
        numbers = {xid for pci, xid, _ in xids if pci is not None and pci == gpu["pci"]}
        for number in sorted(numbers)[:MAX_XIDS_OF_GPU]:
            times = [at for pci, xid, at in xids if pci == gpu["pci"] and xid == number]
            gpu["xids"].append({"xid": number, "count": len(times), "at": max(times)})


def server_report(
    source: str, driver: str | None, gpus: list[Gpu], error: str | None = None
) -> dict[str, Any]:
    """Return the whole report: the GPUs and what else is worth knowing of this server."""
    for gpu in gpus:
        for name, (least, most) in PLAUSIBLE.items():
            if gpu[name] is not None and not least <= gpu[name] <= most:
                gpu[name] = None
        for name in ("type", "vendor_state"):
            gpu[name] = None if gpu[name] is None else printable(gpu[name])[:MAX_TEXT]
    memory = dict(
        re.findall(r"^(MemTotal|MemAvailable):\s+(\d+)", read_text("/proc/meminfo") or "", re.MULTILINE)
    )
    return {
        "format": FORMAT,
        "server": os.uname().nodename,
        "hostname": os.uname().nodename,
        "machine": printable(machine())[:MAX_TEXT],
        "at": time.time(),
        "boot_id": (read_text("/proc/sys/kernel/random/boot_id") or "").strip() or None,
        "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None,
        "source": source,
        "error": None if error is None else printable(error)[:MAX_ERROR],
        "driver": None if driver is None else printable(driver)[:MAX_TEXT],
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "memory_mib": int(memory["MemTotal"]) // 1024 if "MemTotal" in memory else None,
        "memory_available_mib": int(memory["MemAvailable"]) // 1024 if "MemAvailable" in memory else None,
        "disk_free_mib": disk_free_mib(os.environ.get("GPU_MANAGER_JOBS_DIR", "~/.gpu-manager/jobs")),
    }


def machine() -> str:
    """Return what tells this machine from others, as the launchers do: its name and its id."""
    machine_id = read_text("/etc/machine-id")
    name = os.uname().nodename
    return name if machine_id is None else f"{name}/{machine_id.strip()}"


def disk_free_mib(folder: str) -> int:
    """Return the free disk of the jobs' folder, or of the nearest one above it that exists."""
    folder = os.path.abspath(os.path.expanduser(folder))
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize // MIB


TOOLS: dict[str, Callable[[], tuple[str | None, list[Gpu]]]] = {
    "nvidia-smi": nvidia_smi,
    "amd-smi": amd_smi,
    "rocm-smi": rocm_smi,
    "npu-smi": npu_smi,
}


def ask_tool(name: str, read: Callable[[], tuple[str | None, list[Gpu]]]) -> tuple[str | None, list[Gpu]]:
    """Return driver and GPUs by a tool; raises `ProbeError`, also if it answers in another form."""
    try:
        return read()
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ProbeError(f"{name} answers in a form that is not known: {error!r}") from error


class Probe:
    """The tools of this server, opened; `watch` also collects XIDs between two reports."""

    def __init__(self, watch: bool = False) -> None:
        path = os.environ.get("GPU_MANAGER_NVML") or "libnvidia-ml.so.1"
        self._nvml: Nvml | None = None
        try:
            self._nvml = Nvml(path)
        except OSError as error:
            import shutil  # here, as most servers have the library

            tools = [name for name in TOOLS if shutil.which(name)]
            if not tools:
                names = ", ".join(TOOLS)
                raise ProbeError(f"no GPU library or tool: {error}; none of {names} on the PATH") from error
            self._tool = tools[0]
        else:
            if watch:
                self._nvml.watch()
            boot_time = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
            lines = kernel_log()
            self._knows_xids = watch or lines is not None
            self._xids = kernel_xids(lines or [], boot_time)

    def report(self) -> dict[str, Any]:
        """Return the report of this moment; XIDs are in one report only."""
        if self._nvml is None:
            return server_report(self._tool, *ask_tool(self._tool, TOOLS[self._tool]))
        gpus = self._nvml.gpus()
        if self._knows_xids:
            add_xids(gpus, self._xids + self._nvml.new_xids())
            self._xids = []
        return server_report("nvml", self._nvml.driver(), gpus)


def give_up() -> None:
    """End the process from another thread: a call of the library that hangs cannot be interrupted."""
    answer(server_report("none", None, [], f"no answer within {PROBE_TIMEOUT_S:g} s: the GPU driver hangs"))
    os._exit(1)


def answer(report: dict[str, Any]) -> None:
    """Print a report as a line of its own, whatever a library printed before."""
    print("\n" + json.dumps(report), flush=True)


def main() -> None:
    """Print one report, or with --loop one for each line of standard input."""
    faulthandler.enable()  # names a crash of the library on standard error
    loop = "--loop" in sys.argv[1:]
    probe = None
    while line := sys.stdin.readline() if loop else "once":
        watchdog = threading.Timer(PROBE_TIMEOUT_S, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            probe = probe or Probe(watch=loop)
            report = probe.report()
        except ProbeError as error:
            report = server_report("none", None, [], str(error))
            probe = None
        if line.strip() == "jobs":
            report["jobs"] = live_jobs()
        watchdog.cancel()
        answer(report)
        if not loop:
            return


if __name__ == "__main__":
    main()
