"""`gpu-manager bench`."""
