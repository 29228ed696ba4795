"""pytest plugin: ``pytest --secure-loader`` runs any project's tests over encrypted safetensors files.

Every file that is written through safetensors (``save_file``, ``save_pretrained``, accelerate, peft, …) is encrypted
with keys made up for the run, and every file so written is decrypted when it is read. Files that were plain before,
such as fixtures, are read as they are. Without the option nothing happens and nothing is imported.

Child processes that the tests start do not have the keys, and code that parses safetensors headers by itself sees the
encrypted file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

OPTION = "--secure-loader"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("secure-loader")
    group.addoption(
        OPTION,
        action="store_true",
        default=False,
        help="encrypt every safetensors file that a test writes, and decrypt it when it is read",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Route safetensors for the whole process, if asked."""
    if not config.getoption(OPTION):
        return
    from ..config import LoaderConfig
    from ..core.session import Session
    from ..core.trust import TrustStore
    from ..hf import install
    from ..hf.context import Context, Writer, set_default

    install()
    session = Session(keys=[], trust=TrustStore([]), config=LoaderConfig())
    set_default(Context(session, writer=Writer.ephemeral_one(), passive=True))
    config.add_cleanup(lambda: set_default(None))


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say so at the top."""
    return "secure-loader: safetensors files of this run are encrypted" if config.getoption(OPTION) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many files it was about: a run that encrypted nothing proves nothing."""
    if not config.getoption(OPTION):
        return
    from ..hf.routing import Counter

    terminalreporter.write_sep("-", "secure-loader")
    terminalreporter.write_line(f"{Counter.written} files written encrypted, {Counter.opened} opened")
