"""GPU leases for Apache Airflow tasks: allocator, stores and manager."""

__version__ = "0.1.0"
