"""`python -m resource_manager` is `gpu-manager`."""

from resource_manager.lazy import program_of


def main() -> None:
    program_of("resource_manager.cli")()


if __name__ == "__main__":
    main()
