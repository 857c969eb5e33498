"""`gpu-manager doctor`: each check is a function of what was observed."""
