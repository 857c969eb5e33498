"""Durations of data transfers between devices."""

from __future__ import annotations

from simulator.edge.dataset import METRIC_PERIOD_S, NO_METRIC, Dataset, Device


def transfer_s(dataset: Dataset, source: Device, target: Device, start_s: int, size: int) -> int | None:
    """Return the seconds to transfer `size` units from `start_s` on; None if a metric is missing meanwhile.

    0 on one device or within one cloud, else the size by the slower fixed rate, rounded up; with a user
    device, the sum of its rate of each second has to reach the size.
    """
    if source.index == target.index:
        return 0
    ues = [device.index - dataset.first_ue for device in (source, target) if device.kind == "UE"]
    if ues:
        return _wireless_s([dataset.rate_rows[ue] for ue in ues], start_s, size)
    if source.kind == target.kind == "Cloud" and source.cloud_id == target.cloud_id:
        return 0
    if source.kind == target.kind:
        rate = min(source.rate, target.rate)
    else:
        rate = source.rate if source.kind == "BS" else target.rate
    return -(-size // rate)


def upload_s(dataset: Dataset, ue: Device, start_s: int, size: int) -> tuple[int, Device] | None:
    """Return the seconds of an upload from a user device, and the base station at `start_s`, which keeps it.

    None if the device has no metric at `start_s` or during the upload.
    """
    row = ue.index - dataset.first_ue
    station = int(dataset.ue_bs[row, start_s % METRIC_PERIOD_S])
    if station == NO_METRIC:
        return None
    took = _wireless_s([dataset.rate_rows[row]], start_s, size)
    return None if took is None else (took, dataset.by_name["BS", station])


def _wireless_s(rates: list[list[int]], start_s: int, size: int) -> int | None:
    second, left = start_s, size
    while left > 0:
        rate = min(row[second % METRIC_PERIOD_S] for row in rates)
        if rate == NO_METRIC:
            return None
        left -= rate
        second += 1
        if left > 0 and second - start_s == METRIC_PERIOD_S:  # never offline: each period moves as much
            moved = size - left
            if not moved:
                return None
            periods = (left - 1) // moved
            second, left = second + periods * METRIC_PERIOD_S, left - periods * moved
    return second - start_s
