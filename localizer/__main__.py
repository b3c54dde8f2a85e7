"""`python -m localizer` is `localize`."""

from localizer.cli.main import main

if __name__ == "__main__":
    main()
