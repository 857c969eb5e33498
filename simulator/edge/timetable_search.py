"""Placement of jobs, one after another, in future free capacity: the compiled part of policy `timetable`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from simulator.edge.dataset import METRIC_PERIOD_S as PERIOD_S

NONE = -1
FAR_S = 1 << 60
"""Later than every end, and than the sum of all ends."""


class Problem(NamedTuple):
    """Dataset as arrays. Devices are numbered as in the dataset, user devices last; tasks in its order.

    `edge_*` are parent and size, task by task; `link_rate` and `link_bs` are by user device and second.
    `toll` is, by task and host or base station, the fraction of all fast capacity the task takes there.
    """

    kind: Any
    factor: Any
    rate: Any
    cloud: Any
    online: Any
    offline: Any
    first_ue: int
    link_rate: Any
    link_bs: Any
    cpus: Any
    memory: Any
    prepare: Any
    compute: Any
    category: Any
    output: Any
    edge_from: Any
    edge_task: Any
    edge_size: Any
    job_of: Any
    arrival: Any
    job_from: Any
    job_tasks: Any
    toll: Any


class Timetable(NamedTuple):
    """Free capacity by device and second, and the device and times of each task.

    A task holds its device from `held` to `end`, and is matched at `start`. `before` is the task whose
    executor it reuses, `after` the one that reuses its own. `tails` are, by device (user devices excepted)
    and category, the tasks whose executor no later task reuses.
    """

    free_cpus: Any
    free_memory: Any
    device: Any
    held: Any
    start: Any
    end: Any
    kept_on: Any
    before: Any
    after: Any
    tails: Any
    tail_count: Any
    latest: Any


@njit(cache=True)
def change_free(p: Any, t: Any, device: int, task: int, begin: int, end: int, sign: int) -> None:
    cpus, memory = sign * p.cpus[task], sign * p.memory[task]
    for second in range(begin, end):
        t.free_cpus[device, second] -= cpus
        t.free_memory[device, second] -= memory


@njit(cache=True)
def moved_s(p: Any, t: Any, task: int, device: int) -> int:
    """Return the seconds to transfer the data of all parents to a host or base station."""
    longest = 0
    for edge in range(p.edge_from[task], p.edge_from[task + 1]):
        source = t.kept_on[p.edge_task[edge]]
        if source == device:
            continue
        if p.kind[source] == 0 and p.kind[device] == 0:
            if p.cloud[source] == p.cloud[device]:
                continue
            rate = min(p.rate[source], p.rate[device])
        elif p.kind[source] == p.kind[device]:
            rate = min(p.rate[source], p.rate[device])
        else:
            rate = p.rate[source] if p.kind[source] == 1 else p.rate[device]
        longest = max(longest, (p.edge_size[edge] + rate - 1) // rate)
    return longest


@njit(cache=True)
def first_fit(p: Any, t: Any, device: int, task: int, begin: int, length: int, latest: int) -> int:
    """Return the first second from `begin` to `latest` with enough free for `length` seconds, or NONE."""
    cpus, memory = p.cpus[task], p.memory[task]
    free_cpus, free_memory = t.free_cpus[device], t.free_memory[device]
    second = begin
    horizon = min(latest + length, free_cpus.shape[0])
    while second < horizon:
        if free_cpus[second] < cpus or free_memory[second] < memory:
            begin = second + 1
            if begin > latest:
                break
        elif second - begin + 1 == length:
            return begin
        second += 1
    return NONE


@njit(cache=True)
def wireless_s(rate: Any, row: int, start: int, size: int, last: int) -> int:
    """Return the seconds to transfer data over a user device's link; NONE if it ends after `last`."""
    second = start
    while size > 0:
        if second > last:
            return NONE
        size -= rate[row, second % PERIOD_S]
        second += 1
    return second - start


@njit(cache=True)
def next_online(online: int, offline: int, second: int, takes_s: int) -> int:
    """Return the first second from `second` on from which a user device stays online for so long."""
    period = second // PERIOD_S * PERIOD_S
    second = max(second, period + online)
    return second if second + takes_s <= period + offline else period + PERIOD_S + online


@njit(cache=True)
def ue_fit(
    p: Any, t: Any, device: int, task: int, held_from: int, size: int, best: int
) -> tuple[int, int, int]:
    """Return (held from, end, base station) of the earliest end before `best` on a user device; NONE if none.

    The device must be long enough online for the task; it is held from `held_from` on at the earliest.
    """
    row = device - p.first_ue
    prepare, run = p.prepare[task], p.compute[task] * p.factor[device]
    cpus, memory = p.cpus[task], p.memory[task]
    free_cpus, free_memory = t.free_cpus[device], t.free_memory[device]
    while True:
        held_from = next_online(p.online[device], p.offline[device], held_from, prepare + run)
        last = held_from // PERIOD_S * PERIOD_S + p.offline[device]
        start = held_from + prepare
        if start + run >= best or last + 1 >= free_cpus.shape[0]:
            return NONE, FAR_S, NONE
        down = wireless_s(p.link_rate, row, start, size, last)
        up = NONE
        computed = start + down + run
        if down != NONE and computed <= last:
            up = wireless_s(p.link_rate, row, computed, p.output[task], last)
        if up == NONE:
            held_from = last + 1
            continue
        end = computed + up
        second = end - 1
        while second >= held_from and free_cpus[second] >= cpus and free_memory[second] >= memory:
            second -= 1
        if second < held_from:
            if end >= best:
                return NONE, FAR_S, NONE
            return held_from, end, p.link_bs[row, computed % PERIOD_S]
        held_from = second + 1


@njit(cache=True)
def place(p: Any, t: Any, task: int, price: float, latest_end: int) -> bool:
    """Place the task where end + price x toll is least; return False if it does not fit before the horizon.

    With `latest_end`, place it on the user device where it ends first, if it ends by then.
    """
    ready = p.arrival[p.job_of[task]]
    size: Any = np.int64(0)  # a literal would be compiled for itself, and all that takes it
    for edge in range(p.edge_from[task], p.edge_from[task + 1]):
        ready = max(ready, t.end[p.edge_task[edge]])
        size = max(size, p.edge_size[edge])
    if latest_end and place_on_ue(p, t, task, ready, size, latest_end + 1) < FAR_S:
        allocate_task(p, t, task)
        return True
    t.device[task] = NONE
    best = place_on_fixed(p, t, task, ready, price)
    best = min(best, place_on_ue(p, t, task, ready, size, best))
    if best == FAR_S:
        return False
    allocate_task(p, t, task)
    return True


@njit(cache=True)
def stand(
    t: Any, task: int, device: int, held_from: int, start: int, end: int, kept_on: int, before: int
) -> None:
    t.device[task], t.held[task], t.start[task], t.end[task] = device, held_from, start, end
    t.kept_on[task], t.before[task], t.after[task] = kept_on, before, NONE


@njit(cache=True)
def place_on_fixed(p: Any, t: Any, task: int, ready: int, price: float) -> int:
    """Find the host or base station where end + toll is least; return that sum.

    An executor is prepared in advance, so that it is free when the task is ready; or the task reuses the
    executor of another task of its category.
    """
    best = FAR_S
    prepare = p.prepare[task]
    for device in range(p.first_ue):
        takes = moved_s(p, t, task, device) + p.compute[task] * p.factor[device]
        length = prepare + takes
        toll = int(price * p.toll[task, device] * length)
        held = first_fit(p, t, device, task, max(0, ready - prepare), length, best - toll - length - 1)
        if held != NONE:
            best = held + length + toll
            stand(t, task, device, held, held + prepare, held + length, device, NONE)
        cell = device, p.category[task]
        for i in range(t.tail_count[cell]):
            other = t.tails[cell][i]
            held = t.end[other]
            start = max(ready, held)
            end = start + takes
            follows = start - held <= prepare and end + toll < best
            if follows and first_fit(p, t, device, task, held, end - held, held) == held:
                best = end + toll
                stand(t, task, device, held, start, end, device, other)
    return best


@njit(cache=True)
def place_on_ue(p: Any, t: Any, task: int, ready: int, size: int, before: int) -> int:
    """Find the user device where the task ends first, if before `before`; return its end or FAR_S."""
    best = FAR_S
    first = max(0, ready - p.prepare[task])
    for device in range(p.first_ue, p.kind.shape[0]):
        # Nearly all devices are ruled out here: the call would take longer, for it counts references.
        takes_s = p.prepare[task] + p.compute[task] * p.factor[device]
        before = min(before, best)
        online, offline = p.online[device], p.offline[device]
        if takes_s > offline - online or next_online(online, offline, first, takes_s) + takes_s >= before:
            continue
        held, end, kept_on = ue_fit(p, t, device, task, first, size, before)
        if held != NONE:
            best = end
            stand(t, task, device, held, held + p.prepare[task], end, kept_on, NONE)
    return best


@njit(cache=True)
def allocate_task(p: Any, t: Any, task: int) -> None:
    change_free(p, t, t.device[task], task, t.held[task], t.end[task], 1)
    before = t.before[task]
    if before != NONE:
        remove_tail(p, t, before)
        t.after[before] = task
    add_tail(p, t, task)


@njit(cache=True)
def add_tail(p: Any, t: Any, task: int) -> None:
    device = t.device[task]
    if device < p.first_ue:
        cell = device, p.category[task]
        t.tails[cell][t.tail_count[cell]] = task
        t.tail_count[cell] += 1


@njit(cache=True)
def remove_tail(p: Any, t: Any, task: int) -> None:
    device = t.device[task]
    if device < p.first_ue:
        cell = device, p.category[task]
        last = t.tail_count[cell] - 1
        for place_ in range(last + 1):
            if t.tails[cell][place_] == task:
                t.tails[cell][place_] = t.tails[cell][last]
                t.tail_count[cell] = last
                return


@njit(cache=True)
def deallocate_job(p: Any, t: Any, job: int) -> None:
    """Deallocate the tasks of a job; it must be the last one placed."""
    for i in range(p.job_from[job + 1] - 1, p.job_from[job] - 1, -1):
        task = p.job_tasks[i]
        change_free(p, t, t.device[task], task, t.held[task], t.end[task], -1)
        remove_tail(p, t, task)
        before = t.before[task]
        if before != NONE:
            t.after[before] = NONE
            add_tail(p, t, before)


@njit(cache=True)
def place_all(p: Any, t: Any, job: int, price: float) -> int:
    """Place the tasks of a job, the highest upward rank first; return its end, FAR_S if it does not fit.

    Tasks with a latest end, which is 0 for none, go to user devices if they end there by then.
    """
    end = 0
    for i in range(p.job_from[job], p.job_from[job + 1]):
        task = p.job_tasks[i]
        if not place(p, t, task, price, t.latest[task]):
            return FAR_S
        end = max(end, t.end[task])
    return end


@njit(cache=True)
def set_latest(p: Any, t: Any, job: int, latest: int) -> None:
    for i in range(p.job_from[job], p.job_from[job + 1]):
        t.latest[p.job_tasks[i]] = latest


@njit(cache=True)
def place_job(p: Any, t: Any, job: int, price: float) -> int:
    """Place the job; move its tasks with slack to user devices if it then ends no later; return its end."""
    set_latest(p, t, job, 0)
    end = place_all(p, t, job, price)
    if end == FAR_S or p.first_ue == p.kind.shape[0]:
        return end
    first, last = p.job_from[job], p.job_from[job + 1]
    set_latest(p, t, job, end)
    for i in range(last - 1, first - 1, -1):
        task = p.job_tasks[i]
        for edge in range(p.edge_from[task], p.edge_from[task + 1]):
            parent = p.edge_task[edge]
            t.latest[parent] = min(t.latest[parent], t.start[task])
    deallocate_job(p, t, job)
    if place_all(p, t, job, price) > end:
        deallocate_job(p, t, job)
        set_latest(p, t, job, 0)
        place_all(p, t, job, price)
    return end


@njit(cache=True)
def build(p: Any, t: Any, order: Any, price: float) -> int:
    """Place all jobs in that order; return the sum of their ends, FAR_S if one does not fit."""
    total = 0
    behind = order.shape[0]
    for job in order:
        behind -= 1
        end = place_job(p, t, job, price * behind)
        if end == FAR_S:
            return FAR_S
        total += end
    return total
