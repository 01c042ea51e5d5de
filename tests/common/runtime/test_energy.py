"""Joules of an iteration: a counter that can be believed, and counters that can't."""
import contextlib
import threading
import time

import pytest
import torch

from common.runtime import energy, machine
from common.runtime.energy import NoEnergy, Reading, energy_of

pytestmark = pytest.mark.unit

GPU = torch.device("cuda")
BEGAN, ENDED = 100.0, 103.0


def steady(watts: float = 500.0, power: float | None = 500.0) -> list[Reading]:
    """What a counter says that moves every tenth of a second, from before the work until behind it."""
    readings = []
    for number in range(36):
        readings.append(Reading(BEGAN - 0.25 + 0.1 * number, 1e6 + 0.1 * watts * number, power))
    return readings


def of(readings: list[Reading], averaged: bool = False) -> energy.Energy:
    return energy_of(readings, BEGAN, ENDED, 0.02, averaged)


# ------------------------------------------------------------------------------------------------------- what it says


def test_a_steady_counter_gives_watts_and_joules_of_an_iteration():
    used = of(steady())
    assert used.watts == pytest.approx(500.0) and used.joules == pytest.approx(500.0 * 0.02)
    assert used.sampled_watts == pytest.approx(500.0)
    assert energy.SECONDS <= used.seconds <= ENDED - BEGAN - energy.SETTLE_SECONDS


def test_energy_is_that_of_the_work_alone():
    """What was counted before it settled, and behind it, is another's."""
    readings = []
    for reading in steady():
        early, late = reading.seconds < BEGAN + energy.SETTLE_SECONDS, reading.seconds > ENDED
        wrong = 9.0 if late else 0.0 if early else 1.0
        readings.append(Reading(reading.seconds, reading.joules + (1e5 if late else 0.0), 500.0 * wrong))
    used = of(readings)
    assert used.watts == pytest.approx(500.0) and used.sampled_watts == pytest.approx(500.0)


def test_readings_between_two_moves_change_nothing():
    readings = []
    for reading in steady():
        readings += [reading, Reading(reading.seconds + 0.05, reading.joules, 9e9)]
    assert of(readings) == of(steady())


def test_without_a_power_sensor_the_counter_stands_alone():
    used = of(steady(power=None))
    assert used.watts == pytest.approx(500.0) and used.sampled_watts is None


def test_readings_that_are_averages_of_a_second_count_a_second_after_the_first_move():
    """The earlier ones hold what ran before."""
    mixed = [Reading(reading.seconds, reading.joules, 0.0 if reading.seconds < BEGAN + 1.2 else 510.0)
             for reading in steady()]
    assert of(mixed, averaged=True).sampled_watts == 510.0
    with pytest.raises(NoEnergy):
        of(mixed)


# ------------------------------------------------------------------------------------------- what can't be believed


def test_a_counter_that_stands_still_says_nothing():
    with pytest.raises(NoEnergy, match="stood still"):
        of([Reading(reading.seconds, 1e6, 500.0) for reading in steady()])
    with pytest.raises(NoEnergy, match="stood still"):
        of([])


def test_a_counter_that_stalls_half_way_says_nothing():
    stalled = [Reading(reading.seconds, min(reading.joules, 1e6 + 450.0), 500.0) for reading in steady()]
    with pytest.raises(NoEnergy, match="stood still"):
        of(stalled)


@pytest.mark.parametrize("jump", [1e4, -300.0])
def test_a_counter_that_jumps_disagrees_with_the_power_readings(jump):
    """Or goes back, where it jumps down."""
    jumped = [Reading(reading.seconds, reading.joules + (jump if reading.seconds > 101.0 else 0.0), 500.0)
              for reading in steady()]
    with pytest.raises(NoEnergy, match="power readings 500 W" if jump > 0 else "went back"):
        of(jumped)


def test_a_counter_that_wraps_goes_back():
    with pytest.raises(NoEnergy, match="went back"):
        of([Reading(reading.seconds, reading.joules % (1e6 + 800.0), 500.0) for reading in steady()])


@pytest.mark.parametrize("power, believed", [(455.0, True), (550.0, True), (454.0, False), (560.0, False)])
def test_counter_and_power_readings_agree_within_ten_percent(power, believed):
    disagrees = pytest.raises(NoEnergy, match=f"says 500 W, the power readings {power:.0f} W")
    with contextlib.nullcontext() if believed else disagrees:
        assert of(steady(power=power)).sampled_watts == power


# ---------------------------------------------------------------------------------------------------------- measuring


class FakeMeter:
    """A counter that moves at every look; `watts` may disagree with it for the first `bad` times that it is used."""
    averaged = False

    def __init__(self, bad: int = 0):
        self.bad, self.used = bad, 0
        self._began = time.perf_counter()

    def joules(self) -> float | None:
        return 300.0 * (time.perf_counter() - self._began)

    def watts(self) -> float | None:
        return 9e9 if self.used <= self.bad else 300.0


@pytest.fixture
def meter(monkeypatch):
    """meter(fake): what the GPU has; its work takes no time but what the test makes it take."""
    def set_up(fake):
        @contextlib.contextmanager
        def power_meter(device):
            yield fake
        monkeypatch.setattr(machine, "power_meter", power_meter)
        monkeypatch.setattr(energy, "SECONDS", 0.03)
        monkeypatch.setattr(energy, "SETTLE_SECONDS", 0.005)
        monkeypatch.setattr(energy, "_POLL_SECONDS", 0.001)
        return fake
    return set_up


def working(fake, count: int = 4) -> None:
    fake.used += 1
    time.sleep(0.02 * count)


@pytest.mark.parametrize("bad, known", [(0, True), (1, True), (2, False)])
def test_what_can_not_be_believed_is_done_once_more(meter, bad, known):
    fake = meter(FakeMeter(bad))
    used, reason = energy.metered(GPU, lambda count: working(fake, count), 4)
    assert fake.used == min(bad + 1, 2) and (used is not None) == known
    assert reason == "" if known else "the power readings" in reason
    if used:
        assert used.watts == pytest.approx(300.0, rel=0.2) and used.joules >= 0.9 * used.watts * 0.08 / 4


@pytest.mark.parametrize("took, tried", [(2.5, [100]), (2.1, [100, 142]), (1.3, [100, 229])])
def test_work_that_ended_too_early_runs_longer_the_second_time(took, tried, monkeypatch):
    """A host that launches slower in some rounds than in others: the iterations were expected to take longer."""
    now, seen = [0.0], []

    class Watch:
        def __init__(self, meter):
            self.readings = []

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.readings = [Reading(0.1 * number, 50.0 * number, 500.0) for number in range(int(10 * now[0]) + 1)]

    @contextlib.contextmanager
    def power_meter(device):
        yield FakeMeter()

    def work(count: int) -> None:
        seen.append(count)
        now[0] += took / 100 * count

    monkeypatch.setattr(machine, "power_meter", power_meter)
    monkeypatch.setattr(energy, "_Watch", Watch)
    monkeypatch.setattr(energy.time, "perf_counter", lambda: now[0])
    used, reason = energy.metered(GPU, work, 100)
    assert seen == tried and reason == ""
    assert used is not None and used.watts == pytest.approx(500.0)
    assert used.joules == pytest.approx(500.0 * took / 100)


def test_work_that_is_too_short_says_so():
    with pytest.raises(NoEnergy, match=r"the work took 2\.1 s, and 2\.7 s are needed"):
        energy_of(steady(), BEGAN, BEGAN + 2.1, 0.02, False)


def test_without_a_counter_nothing_runs(meter):
    meter(None)
    assert energy.metered(GPU, lambda count: pytest.fail("it ran"), 4) == (None, "no energy counter")


def test_a_counter_that_goes_away_is_no_error(meter, monkeypatch):
    fake = meter(FakeMeter())
    monkeypatch.setattr(fake, "joules", lambda: None)
    assert energy.metered(GPU, lambda count: working(fake, count), 4) == (None, "the energy counter stood still")


def test_nobody_watches_once_the_work_is_done_or_has_failed(meter):
    fake = meter(FakeMeter())
    before = threading.active_count()
    energy.metered(GPU, lambda count: working(fake, count), 4)
    with pytest.raises(KeyboardInterrupt):
        energy.metered(GPU, lambda count: (_ for _ in ()).throw(KeyboardInterrupt), 4)
    assert threading.active_count() == before
