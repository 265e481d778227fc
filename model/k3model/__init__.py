"""The native Kimi K3 network.

Importing this package imports neither torch nor transformers, and changes nothing in either.
"""

from __future__ import annotations


def register() -> None:
    """Make transformers' Auto classes resolve K3 checkpoints without remote code; see ``k3model.auto``.

    Raises:
        ImportError: transformers is not installed.
    """
    from k3model.auto.registration import register as register_all

    register_all()
