"""``python -m simulator`` is the ``trainsim`` command."""

from simulator.cli import main

if __name__ == "__main__":
    main()
