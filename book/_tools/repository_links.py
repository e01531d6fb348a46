"""Links to the sources and to Colab, derived from the remote `origin`: the book of a fork links to the fork."""

import re
import subprocess

from sphinx.application import Sphinx
from sphinx.config import Config

# The hosts whose pages the theme knows how to link to.
HOSTS = ("github.com", "gitlab.com", "bitbucket.org")


def web_address(remote: str) -> str:
    """The web address of a repository without name, token or suffix, or "" where it has none.

    >>> web_address("https://user:token@github.com/ada/d2lps.git")
    'https://github.com/ada/d2lps'
    >>> web_address("git@github.com:ada/d2lps.git")
    'https://github.com/ada/d2lps'
    >>> web_address("/srv/git/d2lps")
    ''
    """
    match = re.fullmatch(r"(?:\w+://)?(?:[^@/]*@)?([\w.-]+)[:/](.+?)(?:\.git)?/?", remote.strip())
    if match is None or match[1] not in HOSTS:
        return ""
    return f"https://{match[1]}/{match[2]}"


def origin(folder: str) -> str:
    """The address of the remote `origin`, or "" where there is none, or no git."""
    command = ["git", "-C", folder, "remote", "get-url", "origin"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def configure(app: Sphinx, config: Config) -> None:
    """Fill in the repository's address, or take away every button that would need it."""
    options = config.html_theme_options
    address = web_address(origin(str(app.confdir or app.srcdir)))
    options["repository_url"] = address
    for button in ("use_repository_button", "use_issues_button", "use_edit_page_button"):
        options[button] = bool(address)
    if "github.com" not in address:  # Colab opens notebooks from GitHub only
        options["launch_buttons"] = {}
