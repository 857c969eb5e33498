"""Durations of transfers in the cases the public datasets do not show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.edge.dataset import NO_METRIC
from simulator.edge.transfers import transfer_s, upload_s
from tests.simulator.edge.small import job, world


def test_between_cloud_and_station_the_rate_of_the_station_counts_even_if_it_is_higher() -> None:
    cloud, station = world(job(0, 1), stations=1).devices
    slow = replace(cloud, rate=5)
    dataset = world(job(0, 1), stations=1)
    assert transfer_s(dataset, slow, station, 0, 2500) == transfer_s(dataset, station, slow, 0, 2500) == 3


def test_between_two_user_devices_the_slower_one_counts_in_each_second() -> None:
    dataset = world(job(0, 1), stations=1, ues=2)
    dataset.ue_rate[1, 4:] = 4
    *_, first, second = dataset.devices
    assert transfer_s(dataset, first, second, 2, 25) == 4  # 10, 10, 4, 4


@pytest.mark.parametrize(("start_s", "seconds"), [(2, 3), (3, None)])
def test_a_second_without_a_metric_ends_a_transfer(start_s: int, seconds: int | None) -> None:
    dataset = world(job(0, 1), stations=1, ues=1)
    dataset.ue_rate[0, 5] = dataset.ue_bs[0, 5] = NO_METRIC
    host, station, device = dataset.devices
    assert transfer_s(dataset, host, device, start_s, 30) == seconds
    assert upload_s(dataset, device, start_s, 30) == (None if seconds is None else (seconds, station))
    assert upload_s(dataset, device, 5, 0) is None


@pytest.mark.parametrize(
    ("rates", "start_s", "size", "seconds"),
    [
        ({}, 7, 1, None),
        ({2: 1}, 0, 1, 3),  # one unit a period, in its third second
        ({2: 1}, 0, 2, 1203),
        ({2: 1}, 0, 4, 3603),
        ({2: 1}, 3, 10**6, 1200 * 10**6),
        (dict.fromkeys(range(1200), 3), 5, 3600, 1200),
        (dict.fromkeys(range(1200), 3), 5, 3601, 1201),
        (dict.fromkeys(range(1200), 3), 5, 9001, 3001),
    ],
)
def test_a_transfer_takes_as_many_periods_as_it_needs(
    rates: dict[int, int], start_s: int, size: int, seconds: int | None
) -> None:
    dataset = world(job(0, 1), stations=1, ues=1)
    dataset.ue_rate[0] = [rates.get(second, 0) for second in range(1200)]
    host, _, device = dataset.devices
    assert transfer_s(dataset, host, device, start_s, size) == seconds
