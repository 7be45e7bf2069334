"""What a script printed."""

import json


def printed(capsys) -> tuple[str, dict]:
    """What people read, and the JSON document on the last line."""
    *people, document = capsys.readouterr().out.strip().splitlines()
    return "\n".join(people), json.loads(document)
