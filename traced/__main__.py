"""Run the command ``traced`` as ``python -m traced``."""

from traced.cli.main import main

if __name__ == "__main__":
    main()
