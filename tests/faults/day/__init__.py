"""A day of a cluster in ten minutes, with a real Airflow: `python -m tests.faults.day`.

60 servers behind agents, and jobs of three teams that come all ways, with gangs, priorities and preemption;
GPUs die, a server vanishes, Redis fails over, a maintenance window comes, everything is upgraded, and the
state goes back to a backup. The jobs write a ledger of their own, by which is proved that nothing that was
promised was lost; a page shows who waited how long.
"""
