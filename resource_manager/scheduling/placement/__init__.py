"""Where a request goes: policies of placement, gangs, and nodes that are avoided."""
