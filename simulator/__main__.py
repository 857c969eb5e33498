"""`python -m simulator` is `gpu-simulate`."""

from resource_manager.lazy import program_of


def main() -> None:
    program_of("simulator.cli")()


if __name__ == "__main__":
    main()
