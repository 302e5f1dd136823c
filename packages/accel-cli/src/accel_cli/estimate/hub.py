"""Questions to the Hugging Face Hub, and what its answers mean."""

from __future__ import annotations

from typing import Any

from accel_cli.errors import UsageError
from accel_cli.estimate.config_json import CONFIG_NAME, LIBRARIES, read_config

REFUSED = (401, 403)
ANSWER_SECONDS = 5.0  # after which the Hub counts as out of reach


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Look a model up.

    Args:
        repo: Its name on the Hub.
        token: To get at models that are not open to all.

    Returns:
        What the Hub knows about it (`huggingface_hub.ModelInfo`); `"gated"` when the Hub refuses to tell; `False` when
        it has no such model.

    Raises:
        UsageError: The Hub cannot be reached, or `repo` cannot be a name there.
    """
    from huggingface_hub import model_info

    try:
        return model_info(repo, token=token, timeout=ANSWER_SECONDS)
    except Exception as error:
        problem = hub_problem(error, repo)
        if problem.kind == "gated":
            return "gated"
        if problem.kind == "missing":
            return False
        raise problem from error


class HubError(UsageError, OSError):
    """The Hub could not give what was asked for.

    An `OSError`, too, as what the Hub's own client raises.

    Attributes:
        kind: `"gated"`, `"missing"`, `"offline"`, `"name"` or `"other"`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def hub_problem(error: Exception, repo: str) -> HubError:
    """Say what went wrong. Only an answer of the Hub makes a model gated; without an answer, it is not known."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return HubError("name", f"{repo!r} is neither a folder nor a name on the Hub, such as 'org/model': check it")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return HubError(
            "gated",
            f"The Hub refuses {repo!r} ({status or 'gated'}): ask for access on its page, then run `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        # the Hub answers 401 for what does not exist, too, so as not to tell what is private
        hint = ", or run `hf auth login` if it is private" if status == 401 else ""
        return HubError("missing", f"The Hub has no model {repo!r}, and there is no such folder: check the name{hint}")
    if status == 401:
        return HubError("gated", f"The Hub refuses {repo!r} (401): run `hf auth login`")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return HubError("other", f"The model {repo!r} has no {CONFIG_NAME}: it is of no library that is known here")
    if status is not None:
        return HubError("other", f"The Hub answered {status} when asked for {repo!r}: try again later")
    if _is_offline(error):
        return HubError(
            "offline",
            f"{repo!r} is no folder, and the Hub cannot be reached (offline: {_first_line(error)}): connect, or name a "
            "local folder",
        )
    return HubError("other", f"Asking the Hub for {repo!r} failed ({type(error).__name__}: {_first_line(error)})")


def model_library(name: str, token: str | None = None) -> str:
    """Which library a model on the Hub is of.

    Raises:
        UsageError: The Hub cannot tell, or it is one that cannot be estimated.
    """
    from huggingface_hub import model_info

    try:
        library = getattr(model_info(name, token=token, timeout=ANSWER_SECONDS), "library_name", None)
    except Exception as error:
        raise hub_problem(error, name) from error
    if library is None:
        raise UsageError(f"The Hub does not say of which library {name!r} is: give --library_name")
    if library not in LIBRARIES:
        raise UsageError(
            f"The model {name!r} is of {library!r}, but only those of {', '.join(LIBRARIES)} can be built"
        )
    return str(library)


def download_config(name: str, token: str | None = None) -> dict[str, Any]:
    """Get a model's `config.json`, from the cache where it is there.

    Raises:
        UsageError: It has none, or the Hub cannot be reached.
    """
    from pathlib import Path

    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        # one question first: a download tries again and again, for minutes, when the network is down
        get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), token=token, timeout=ANSWER_SECONDS)
        path = hf_hub_download(name, CONFIG_NAME, token=token)
    except Exception as error:
        problem = hub_problem(error, name)
        cached = try_to_load_from_cache(name, CONFIG_NAME) if problem.kind == "offline" else None
        if not isinstance(cached, str):
            raise problem from error
        path = cached
    return read_config(Path(path))


def _is_offline(error: BaseException | None) -> bool:
    """True for every way in which the network fails, whichever library the Hub's client uses."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if names & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "TransportError", "ConnectionError", "Timeout",
                    "TimeoutException", "TimeoutError", "ConnectError", "gaierror", "RequestException"}:  # fmt: skip
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
