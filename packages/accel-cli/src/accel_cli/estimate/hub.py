"""Requests to the Hugging Face Hub, and messages for its errors."""

from __future__ import annotations

from typing import Any

from accel_cli.errors import UsageError
from accel_cli.estimate.config_json import CONFIG_NAME, LIBRARIES, read_config

REFUSED = (401, 403)
TIMEOUT_SECONDS = 5.0  # of a request to the Hub


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Look a model up.

    Args:
        repo: Its name on the Hub.
        token: For gated and private models.

    Returns:
        The `huggingface_hub.ModelInfo`; `"gated"` if access is denied; `False` if there is no such model.

    Raises:
        UsageError: The Hub cannot be reached, or `repo` is not a valid name.
    """
    from huggingface_hub import model_info

    try:
        return model_info(repo, token=token, timeout=TIMEOUT_SECONDS)
    except Exception as error:
        problem = hub_problem(error, repo)
        if problem.kind == "gated":
            return "gated"
        if problem.kind == "missing":
            return False
        raise problem from error


class HubError(UsageError, OSError):
    """A request to the Hub failed.

    An `OSError`, too, as what the Hub's own client raises.

    Attributes:
        kind: `"gated"`, `"missing"`, `"offline"`, `"name"` or `"other"`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def hub_problem(error: Exception, repo: str) -> HubError:
    """Convert an error of the Hub's client. A model is gated only if the Hub has answered so."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return HubError("name", f"{repo!r} is neither a folder nor a valid name on the Hub, such as 'org/model'.")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return HubError(
            "gated",
            f"The Hub denies access to {repo!r} ({status or 'gated'}). Ask for access on its page, then run `hf auth login`.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        # the Hub answers 401 for missing models, too, to hide private ones
        hint = ", or run `hf auth login` if it is private" if status == 401 else ""
        return HubError(
            "missing", f"The model {repo!r} was not found on the Hub, nor as a folder. Check the name{hint}."
        )
    if status == 401:
        return HubError("gated", f"The Hub denies access to {repo!r} (401). Run `hf auth login`.")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return HubError("other", f"The model {repo!r} has no {CONFIG_NAME}, so that it is not of a supported library.")
    if status is not None:
        return HubError("other", f"The Hub returned status {status} for {repo!r}. Try again later.")
    if _is_offline(error):
        return HubError(
            "offline",
            f"{repo!r} is not a folder, and the Hub cannot be reached (offline: {_first_line(error)}). Connect to the "
            "network, or name a local folder.",
        )
    return HubError(
        "other", f"The request to the Hub for {repo!r} failed ({type(error).__name__}: {_first_line(error)})."
    )


def model_library(name: str, token: str | None = None) -> str:
    """The library of a model on the Hub.

    Raises:
        UsageError: The Hub does not have it, or it is not supported.
    """
    from huggingface_hub import model_info

    try:
        library = getattr(model_info(name, token=token, timeout=TIMEOUT_SECONDS), "library_name", None)
    except Exception as error:
        raise hub_problem(error, name) from error
    if library is None:
        raise UsageError(f"The Hub does not have the library of {name!r}. Give --library_name.")
    if library not in LIBRARIES:
        raise UsageError(
            f"The model {name!r} is of the library {library!r}, which is not supported. Supported are {', '.join(LIBRARIES)}."
        )
    return str(library)


def download_config(name: str, token: str | None = None) -> dict[str, Any]:
    """Download a model's `config.json`, or read it from the cache.

    Raises:
        UsageError: It has none, or the Hub cannot be reached.
    """
    from pathlib import Path

    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        # one request first: a download retries for minutes when the network is down
        get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), token=token, timeout=TIMEOUT_SECONDS)
        path = hf_hub_download(name, CONFIG_NAME, token=token)
    except Exception as error:
        problem = hub_problem(error, name)
        cached = try_to_load_from_cache(name, CONFIG_NAME) if problem.kind == "offline" else None
        if not isinstance(cached, str):
            raise problem from error
        path = cached
    return read_config(Path(path))


def _is_offline(error: BaseException | None) -> bool:
    """True for network errors, whichever HTTP library the Hub's client uses."""
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
