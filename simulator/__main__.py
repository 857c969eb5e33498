"""`python -m simulator` is `gpu-simulate`."""

from simulator.cli import main

if __name__ == "__main__":
    main()
