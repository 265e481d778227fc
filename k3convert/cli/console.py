"""What a command says: its result on stdout, everything else on stderr, one document under ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from k3convert.errors import K3Error


class Console:
    """Output of one command run."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose

    def result(self, document: Mapping[str, Any], text: str) -> None:
        """Print the result: the document under ``--json``, otherwise the text."""
        if self.as_json:
            print(json.dumps(document))
        elif text:
            print(text)

    def note(self, text: str) -> None:
        """Something worth knowing that stops nothing."""
        if not self.quiet:
            print(f"note: {text}", file=sys.stderr)

    def progress(self, text: str) -> None:
        """What is being done now."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Said under ``--verbose`` alone."""
        if self.verbose:
            print(text, file=sys.stderr)

    def error(self, error: K3Error) -> None:
        """An error for its reader, and its document under ``--json``."""
        if self.as_json:
            print(json.dumps(error.document()))
        print("\n".join(error.lines()), file=sys.stderr)
