"""``python -m k3convert``, which torchrun needs."""

from k3convert.cli.app import main

main()
