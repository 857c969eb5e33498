"""A day of a cluster in ten minutes, with a real Airflow: `python -m tests.faults.day`.

50 servers (an sshd each, and an agent's reports), 300 jobs of three teams with gangs, priorities and
preemption; two GPUs die, one server vanishes, Redis fails over, a maintenance window comes, the service is
killed and started again. The jobs write a ledger of their own, by which is proved that nothing that was
promised was lost; a page shows who waited how long.
"""
