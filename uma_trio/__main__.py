"""`python -m uma_trio`: the same as `uma-trio`."""

from uma_trio.cli.main import main

if __name__ == "__main__":
    main()
