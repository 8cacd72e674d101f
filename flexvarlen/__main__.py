"""`python -m flexvarlen`: the command."""

from flexvarlen.cli import main

main()
