"""Where words end: where a draft may be cut, what a developer would take and what the gate counts as usable must agree on it."""


def ends_word(line: str, at: int) -> bool:
    """Whether no word goes on across position `at` of the line."""
    return not 0 < at < len(line) or not (_in_word(line[at - 1]) and _in_word(line[at]))


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"
