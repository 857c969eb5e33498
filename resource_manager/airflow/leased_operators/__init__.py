"""Other people's operators under leases: `with_gpus`."""
