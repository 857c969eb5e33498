"""Schedulers that OASiS is compared with; each obeys the same constraints on the same ledger."""

from simulator.oasis.baselines.dorm import Dorm
from simulator.oasis.baselines.drf import Drf
from simulator.oasis.baselines.fifo import Fifo
from simulator.oasis.baselines.rrh import Rrh

__all__ = ["Dorm", "Drf", "Fifo", "Rrh"]
