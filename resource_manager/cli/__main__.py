"""Entry point of `python -m resource_manager.cli`, which is `gpu-manager`."""

from resource_manager.cli import main

main(prog_name="gpu-manager")
