"""`GPUResourceManager`: demands in, leases or refusals out."""
