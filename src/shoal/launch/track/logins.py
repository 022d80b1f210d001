"""Check before a run starts whether a tracker's server accepts the login. A server that does not respond does not
block the run.
"""

from __future__ import annotations

import base64
import configparser
import json
import netrc
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from shoal.facts.problem import Problem

PATIENCE = 5.0  # seconds
# W&B modes that send nothing.
UNSENT = ("offline", "dryrun", "disabled")
WANDB, HUB = "https://api.wandb.ai", "https://huggingface.co"
# HTTP status codes for a rejected login.
REFUSALS = (401, 403)

Environment = Mapping[str, str]


def refused_login(tracker: str, environment: Environment) -> Problem | None:
    """Why a run with this tracker must not start."""
    return {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}.get(tracker, lambda _: None)(environment)


def _wandb(environment: Environment) -> Problem | None:
    if environment.get("WANDB_MODE", "").lower() in UNSENT:
        return None
    fix = "wandb login, WANDB_MODE=offline, or track.wandb = false"
    place = environment.get("WANDB_BASE_URL") or WANDB
    key = environment.get("WANDB_API_KEY") or _of_netrc(place, environment)[1]
    if not key:
        said = "no login for W&B: WANDB_API_KEY is not set, and netrc has none"
        return Problem(f"track.wandb: {said}", fix)
    question = json.dumps({"query": "query { viewer { id } }"}).encode()
    status, answer = _ask(f"{place.rstrip('/')}/graphql", _basic("api", key), question)
    if status in REFUSALS or (status == 200 and (answer.get("data") or {}).get("viewer", "") is None):
        return Problem(f"track.wandb: {place} does not take the login: it has expired, or is another's", fix)
    return None


def _mlflow(environment: Environment) -> Problem | None:
    place = environment.get("MLFLOW_TRACKING_URI", "")
    # With a plugin only MLflow knows how to log in.
    if not place.startswith(("http://", "https://")) or "MLFLOW_TRACKING_AUTH" in environment:
        return None
    header = {}
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        header = {"Authorization": f"Bearer {token}"}
    elif (login := _mlflow_user(place, environment))[0]:
        header = _basic(*login)
    path = "/api/2.0/mlflow/experiments/search?max_results=1"
    status, _ = _ask(place.rstrip("/") + path, header)
    if status in REFUSALS:
        fix = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; or track.mlflow = false"
        said = f"answers {status} to the login" if header else f"answers {status}, and no login is set"
        return Problem(f"track.mlflow: {_shown(place)} {said}", fix)
    return None


def _mlflow_user(place: str, environment: Environment) -> tuple[str, str]:
    """Credentials as MLflow finds them: from the environment, its own file, or netrc."""
    names = ("mlflow_tracking_username", "mlflow_tracking_password")
    if environment.get(names[0].upper()):
        return environment[names[0].upper()], environment.get(names[1].upper(), "")
    file = configparser.ConfigParser()
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        file.read(Path(environment.get("HOME", "~")).expanduser() / ".mlflow" / "credentials")
        if file.has_option("mlflow", names[0]):
            return file.get("mlflow", names[0]), file.get("mlflow", names[1], fallback="")
    return _of_netrc(place, environment)


def _trackio(environment: Environment) -> Problem | None:
    """Only a Space on the Hub requires a login."""
    home = environment.get("HF_HOME") or str(Path(environment.get("HOME", "~")) / ".cache" / "huggingface")
    token = environment.get("HF_TOKEN", "")
    with suppress(OSError):
        token = token or (Path(home).expanduser() / "token").read_text(encoding="utf-8").strip()
    if not environment.get("TRACKIO_SPACE_ID") or not token:
        return None
    place = environment.get("HF_ENDPOINT") or HUB
    status, _ = _ask(f"{place.rstrip('/')}/api/whoami-v2", {"Authorization": f"Bearer {token}"})
    if status in REFUSALS:
        return Problem(
            f"track.trackio: {place} does not take the token: it has expired, or is another's",
            "hf auth login, HF_TOKEN, or track.trackio = false",
        )
    return None


def _of_netrc(place: str, environment: Environment) -> tuple[str, str]:
    file = Path(environment.get("NETRC") or Path(environment.get("HOME", "~")) / ".netrc").expanduser()
    with suppress(OSError, netrc.NetrcParseError):
        if found := netrc.netrc(file).authenticators(urlsplit(place).hostname or ""):
            return found[0] or "", found[2] or ""
    return "", ""


def _basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _shown(place: str) -> str:
    """The address without a user name and password."""
    return f"{urlsplit(place).scheme}://{urlsplit(place).hostname}"


def _ask(address: str, header: Mapping[str, str], body: bytes | None = None) -> tuple[int, dict[str, Any]]:
    """A server's status, 0 if it does not respond; and its answer, if that is an object."""
    if not address.startswith(("http://", "https://")):
        return 0, {}
    headers = {"Content-Type": "application/json", **header}
    try:
        with urlopen(Request(address, body, headers), timeout=PATIENCE) as answer:  # noqa: S310 checked above
            found = json.loads(answer.read(1 << 20))
            return answer.status, found if isinstance(found, dict) else {}
    except HTTPError as error:
        return error.code, {}
    except (OSError, ValueError):
        return 0, {}
