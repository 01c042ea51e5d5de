"""Which machine this is: what can be told of it without one, and what NVML's numbers are called."""
import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.runtime import machine

pytestmark = pytest.mark.unit
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def an_h200(monkeypatch):
    """Its properties, as torch tells them."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=2**37,
                                 L2_cache_size=60 * 2**20, uuid="5f6e7d8c-0001-0002-0003-000000000004")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    return properties


@pytest.fixture
def nvml(monkeypatch):
    """In place of pynvml: another process on the GPU beside this one, and a GPU without a power sensor."""
    asked = []

    class NVMLError(Exception):
        pass

    def no_sensor(handle):
        raise NVMLError
    running = [SimpleNamespace(pid=machine.os.getpid()), SimpleNamespace(pid=2**22 + 1)]
    fake = SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlShutdown=lambda: asked.append("shut down"), nvmlDeviceGetHandleByUUID=asked.append,
        nvmlSystemGetDriverVersion=lambda: "580.159.03", nvmlDeviceGetComputeRunningProcesses=lambda handle: running,
        nvmlDeviceGetClockInfo=lambda handle, which: 1000 * which, nvmlDeviceGetMaxClockInfo=lambda handle, which: 1980,
        nvmlDeviceGetPowerUsage=no_sensor, nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetTemperature=lambda handle, which: 61, nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x24)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return asked


def test_facts_of_a_cpu_are_its_model_and_no_gpus(monkeypatch):
    monkeypatch.setattr(machine, "_cpu_name", lambda: "A CPU")
    facts = machine.facts(CPU)
    assert (facts["device"], facts["name"], facts["cpu_model"]) == ("cpu", "A CPU", "A CPU")
    assert facts["gpu_uuid"] is facts["cuda"] is facts["driver"] is None
    assert facts["cpu_threads"] == torch.get_num_threads() and facts["torch"] == torch.__version__


def test_facts_of_a_gpu_are_its_own_and_its_hosts(an_h200, nvml, monkeypatch):
    """By its UUID it is told from the next one of its kind, and found in NVML."""
    monkeypatch.setattr(machine, "_cpu_name", lambda: "A CPU")
    facts = machine.facts(GPU)
    assert (facts["device"], facts["name"], facts["cpu_model"]) == ("cuda", "NVIDIA H200", "A CPU")
    assert facts["gpu_uuid"] == f"GPU-{an_h200.uuid}" and facts["driver"] == "580.159.03"
    assert nvml == [f"GPU-{an_h200.uuid}", "shut down"]
    assert (facts["compute_capability"], facts["multiprocessors"], facts["memory_gib"]) == ("9.0", 132, 128.0)


def test_two_versions_of_cudnn_are_reported(an_h200, monkeypatch):
    def mixed():
        raise RuntimeError("cuDNN version incompatibility")
    monkeypatch.setattr(torch.backends.cudnn, "version", mixed)
    assert machine.facts(GPU)["cudnn"] == "two versions"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for paths, told in ((("a/1", "a/2"), 91900), (("a/1", "b/2"), "two versions"), ((), 91900)):
        monkeypatch.setattr(machine, "cudnn_libraries", lambda paths=paths: list(map(Path, paths)))
        assert machine.facts(GPU)["cudnn"] == told


def test_the_state_is_what_can_be_read_of_it(an_h200, nvml):
    """What a GPU has no sensor for is left out."""
    state = machine.state(GPU)
    assert state.pop("load_average") >= 0
    assert state == {"sm_mhz": 1000, "sm_mhz_max": 1980, "memory_mhz": 2000, "power_limit_w": 700.0,
                     "temperature_c": 61, "throttled": ["power cap", "software thermal"]}
    assert machine.state(CPU).keys() == {"load_average"}


def test_neighbours_are_the_other_processes(an_h200, nvml):
    assert machine.neighbours(GPU) == [f"another container's process (pid {2**22 + 1})"]
    assert machine.neighbours(CPU) == []


def test_without_nvml_a_gpu_has_no_clocks_and_no_neighbours(an_h200, monkeypatch):
    """No library, no permission, a partitioned GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.state(GPU).keys() == {"load_average"} and machine.neighbours(GPU) == []
    assert machine.facts(GPU)["driver"] is None


def test_throttling_is_named_as_nvml_numbers_it():
    import pynvml
    named = {"power cap": "SwPowerCap", "hardware slowdown": "HwSlowdown", "software thermal": "SwThermalSlowdown",
             "hardware thermal": "HwThermalSlowdown", "power brake": "HwPowerBrakeSlowdown"}
    bits = {word: getattr(pynvml, f"nvmlClocksThrottleReason{name}") for word, name in named.items()}
    assert {word: bit for bit, word in machine._THROTTLE.items()} == bits
    assert machine._reasons(bits["power cap"] | bits["power brake"]) == ["power cap", "power brake"]
    assert machine._reasons(0x1 | 0x2) == []                               # idle, and told to be slow


@pytest.mark.parametrize("readings, busy", [
    ({"load_average": 2.9, "cpu_threads": 2}, False), ({"load_average": 3.1, "cpu_threads": 2}, True),
    ({"load_average": 9.0}, False), ({"cpu_threads": 2}, False),
])
def test_a_cpu_is_busy_with_more_than_its_threads(readings, busy):
    assert machine.busy(readings) == busy


# -------------------------------------------------------------------------------------------------------------- memory


def test_what_a_cpus_memory_does_not_hold_is_refused(monkeypatch):
    """A GPU says so itself, where Linux would kill the process."""
    monkeypatch.setattr(machine, "memory_total", lambda device: 2 * 2**30)
    machine.refuse_beyond_memory(2 * 2**30, CPU)
    machine.refuse_beyond_memory(9 * 2**30, GPU)
    with pytest.raises(MemoryError, match=r"^a part: about 3 GiB needed, this machine has 2$"):
        machine.refuse_beyond_memory(3 * 2**30, CPU, "a part: ")


def test_memory_is_the_gpus_or_this_processs(an_h200, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    assert machine.memory_total(GPU) == 2**37 and machine.memory_peak(GPU) == 3 * 2**30
    assert machine.peak_in_words(GPU) == "3.0 of 128.0 GiB in use at the peak"
    assert machine.memory_peak(CPU) > 2**24                                # this process has imported torch


def test_a_container_has_the_memory_that_it_may_use(monkeypatch):
    found = {"limit": "max\n"}
    monkeypatch.setattr(machine.Path, "read_text", lambda path: found["limit"])
    whole = machine.memory_total(CPU)
    found["limit"] = "1048576\n"
    assert machine.memory_total(CPU) == 2**20 < whole


# ---------------------------------------------------------------------------------------------------------- power


class FakeMeters:
    """NVML with a counter of millijoules and power readings of milliwatts; what is None is not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self, counter=5_000, usage=600_000, instant=650_000, has_fields=True):
        self.counter, self.usage, self.instant = counter, usage, instant
        if has_fields:
            self.nvmlDeviceGetFieldValues = self._fields

    def _supported(self, value):
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._supported(self.counter)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._supported(self.usage)

    def _fields(self, handle, fields):
        assert fields == [186]                             # NVML_FI_DEV_POWER_INSTANT
        return [SimpleNamespace(nvmlReturn=0 if self.instant else 3, value=SimpleNamespace(uiVal=self.instant or 7))]


@pytest.mark.parametrize("changes, joules, watts, averaged", [
    ({}, 5.0, 650.0, False), ({"instant": None}, 5.0, 600.0, True), ({"has_fields": False}, 5.0, 600.0, True),
    ({"usage": None, "instant": None}, 5.0, None, True), ({"counter": None}, None, 650.0, False)])
def test_a_meter_reads_joules_and_the_power_of_the_moment(changes, joules, watts, averaged):
    """Or that of the second before, where the GPU has no other."""
    meter = machine.PowerMeter(FakeMeters(**changes), "handle")
    assert (meter.joules(), meter.watts(), meter.averaged) == (joules, watts, averaged)


@pytest.mark.parametrize("nvml, there", [(FakeMeters(), True), (FakeMeters(counter=None), False), (None, False)])
def test_a_gpu_without_an_energy_counter_has_no_meter(nvml, there, monkeypatch):
    @contextlib.contextmanager
    def reached(device):
        yield nvml, "handle"
    monkeypatch.setattr(machine, "_nvml", reached)
    with machine.power_meter(torch.device("cuda")) as meter:
        assert (meter is not None) == there


def test_a_cpu_has_no_meter():
    with machine.power_meter(torch.device("cpu")) as meter:
        assert meter is None
