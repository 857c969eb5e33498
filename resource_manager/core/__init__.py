"""Pure state: nodes, requests, leases, and the changes whose fold gives what is free."""
