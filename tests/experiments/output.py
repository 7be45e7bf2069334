"""The output of a script."""

import json


def read_output(capsys) -> tuple[str, dict]:
    """Splits a script's output into its tables and notes, and the JSON document on the last line."""
    *people, document = capsys.readouterr().out.strip().splitlines()
    return "\n".join(people), json.loads(document)
