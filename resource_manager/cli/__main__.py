"""`python -m resource_manager.cli` is `gpu-manager`."""

from resource_manager.cli import main

main(prog_name="gpu-manager")
