"""`python -m disagg` is the same as `disagg`."""

from disagg.cli.main import main

if __name__ == "__main__":
    main()
