"""The hub's own library, imported when it is needed and not before, and what its errors mean for a user."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from edgeinfer.core.errors import HubError, StorageError

Progress = Callable[[str, int, int], None]

_HERE = "Or run a model that is on this machine: edgeinfer models"


def library() -> ModuleType:
    """huggingface_hub, with its telemetry off."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    return huggingface_hub


def bar_class(progress: bool | Progress) -> type | None:
    """The class of progress bars that the library should use; None takes its own, which draws on stderr."""
    if progress is True:
        return None
    hub = library()

    class Bar(hub.utils.tqdm):  # type: ignore[misc, name-defined]  # the base is a module attribute
        """A bar that draws nothing and passes byte counts on."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._label = str(options.get("desc") or "")
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0  # a disabled bar does not count
            if callable(progress) and self._counts_bytes:
                progress(self._label, int(self.n), int(self.total or 0))
            return None

    return Bar


@contextlib.contextmanager
def hub_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turns the library's errors into a HubError or StorageError that says what to do."""
    errors = library().errors
    try:
        yield
    except errors.GatedRepoError as error:
        hint = f"Accept its terms at https://huggingface.co/{repo_id}, then log in with: hf auth login"
        raise HubError(f"{repo_id} is gated.", hint) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo_id} has no revision {revision!r}.", "Give a branch, tag or commit of it.") from error
    except errors.RepositoryNotFoundError as error:
        hint = "Check the spelling; if it is private, log in with: hf auth login"
        raise HubError(f"There is no {repo_id} on the hub, nor a local directory of that name.", hint) from error
    except errors.HFValidationError as error:
        raise HubError(f"{repo_id!r} is not a Hugging Face id.", "Write it as OWNER/NAME.") from error
    except errors.OfflineModeIsEnabled as error:
        raise _forbidden(repo_id) from error
    except errors.LocalEntryNotFoundError as error:
        raise _by_cause(repo_id, error) from error
    except errors.HfHubHTTPError as error:
        raise _answered(repo_id, error.response.status_code) from error
    except errors.HTTPError as error:
        raise _unreachable(repo_id) from error
    except OSError as error:
        raise _system_error(repo_id, error) from error


def _by_cause(repo_id: str, error: Exception) -> HubError:
    """The library says "not in the cache" of whatever kept it from the hub."""
    errors, cause = library().errors, error.__cause__
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return _forbidden(repo_id)
    if isinstance(cause, errors.HfHubHTTPError):
        return _answered(repo_id, cause.response.status_code)
    return _unreachable(repo_id)


def _forbidden(repo_id: str) -> HubError:
    message = f"{repo_id} is not on this machine, and HF_HUB_OFFLINE is set: nothing is fetched."
    return HubError(message, f"Unset it to fetch the model. {_HERE}")


def _unreachable(repo_id: str) -> HubError:
    message = f"You are offline or the hub cannot be reached, and {repo_id} is not on this machine."
    return HubError(message, f"Check the connection; downloads resume. {_HERE}")


def _answered(repo_id: str, status: int) -> HubError:
    if status in (401, 403):
        return HubError(f"The hub refused {repo_id} ({status}).", "Log in with: hf auth login")
    return HubError(f"The hub answered {status} for {repo_id}.", "Try again later; downloads resume.")


def _system_error(repo_id: str, error: OSError) -> HubError | StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError("The disk is full.", "Free some space and try again; downloads resume.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"The hub cache cannot be written: {error}.", "Set HF_HOME to a folder you may write to.")
    return _unreachable(repo_id)
