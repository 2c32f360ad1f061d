"""The two errors of this library: bad input, and a peer that does not answer."""

from collections.abc import Mapping
from types import MappingProxyType


class CPInputError(ValueError):
    """Bad input, raised with the same text by every rank of the widest group that the call uses.

    The text names the first bad rank, sample and token, what was given and what was expected. `usual`: the settings
    that most of the ranks hold, where ranks were compared.
    """

    usual: Mapping[str, object] = MappingProxyType({})


class CPCollectiveError(RuntimeError):
    """A collective of this library did not end: a peer died, timed out or sent another size.

    The text names the step of this library that was waiting and the group; the backend's own error is the cause.
    """


def text_of(error: Exception) -> str:
    """What the other ranks are told of an error of this one."""
    return str(error) if isinstance(error, CPInputError) else f"{type(error).__name__}: {error}"
