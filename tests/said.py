"""What an error says."""

import re


def said(error: BaseException, file: str, *names: str) -> list[str]:
    """The lines of a message, but for those which say that `names`, or the user's call, are in `file`."""
    lines = str(error).splitlines()
    for name in names or ("called at",):
        (line,) = [line for line in lines if re.fullmatch(rf"  {name}: {re.escape(file)}:\d+", line)]
        lines.remove(line)
    return lines
