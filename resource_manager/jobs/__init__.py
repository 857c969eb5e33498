"""Jobs of leases: start, watch and end them, and tell whose they are."""
