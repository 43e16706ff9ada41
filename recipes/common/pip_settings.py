"""Prints the user's pip settings as the environment variables that say the same to uv, which does not read pip's.

    pip config list | python pip_settings.py

One ``export NAME=value`` per line, quoted for a shell. A variable of uv's that is already set wins and is left out.
"""

import ast
import os
import shlex
import sys
from collections.abc import Iterable, Mapping

UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
SEPARATORS = {"find-links": ","}
"""uv splits its lists at spaces, as pip does, except this one."""

SECTION_ORDER = ("global", "install", ":env:")
"""pip's precedence for ``pip install``, weakest first. Sections of other pip commands do not concern it."""


def parse_pip_config(lines: Iterable[str]) -> dict[str, str]:
    """``section.key='value'`` lines of ``pip config list`` as one mapping, the strongest section winning."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in SECTION_ORDER}
    for line in filter(None, map(str.strip, lines)):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in by_section:
            by_section[section][key.lower().replace("_", "-")] = str(ast.literal_eval(value))
    return {key: value for section in SECTION_ORDER for key, value in by_section[section].items()}


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """uv's variables for pip's ``settings``, without those that ``environment`` already has."""
    found = {
        UV_NAMES[key]: SEPARATORS.get(key, " ").join(value.split())
        for key, value in settings.items()
        if key in UV_NAMES and value.strip()
    }
    if "UV_INDEX" in found:
        # pip takes the best version among all indexes, uv by default only looks at the first that has the package.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in environment}


if __name__ == "__main__":
    for name, value in uv_environment(parse_pip_config(sys.stdin), os.environ).items():
        print(f"export {name}={shlex.quote(value)}")
