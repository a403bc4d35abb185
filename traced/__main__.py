"""``python -m traced`` is the command ``traced``."""

from traced.cli.main import main

if __name__ == "__main__":
    main()
