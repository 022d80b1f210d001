"""A ``kubectl`` for tests: a cluster of a few kinds in a file, with the rules that a real one has for a job's life.

There is no Kubernetes on a test machine. What it is asked is kept, so that a test sees in which order.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

KINDS = {"jobset": "JobSet", "trainjob": "TrainJob"}


def main(words: list[str]) -> int:
    place = Path(os.environ["KUBECTL_STATE"])
    there: dict[str, Any] = json.loads(place.read_text())
    manifest = json.loads(sys.stdin.read()) if "-" in words else {}
    name = manifest.get("metadata", {}).get("name", manifest.get("metadata", {}).get("generateName", ""))
    there["asked"].append(" ".join([*words[:2], manifest.get("kind", ""), name]).strip())
    code = _answer(words, there, manifest)
    place.write_text(json.dumps(there))
    return code


def _answer(words: list[str], there: dict[str, Any], manifest: dict[str, Any]) -> int:
    objects: dict[str, Any] = there["objects"]
    if there.get("down"):
        return _no("The connection to the server 10.0.0.1:6443 was refused")
    if words[0] == "api-resources":
        print("\n".join(there["resources"]))
        # As where the server of metrics is down.
        return _no("unable to retrieve the complete list of server APIs: metrics.k8s.io/v1beta1")
    if words[0] in ("apply", "create"):
        kind, named = manifest["kind"], manifest["metadata"].get("name")
        if kind == "TrainJob" and f"TrainingRuntime/{manifest['spec']['runtimeRef']['name']}" not in objects:
            return _no("denied: specified trainingRuntime must be created before the TrainJob is created")
        old = objects.get(f"{kind}/{named}")
        if kind == "JobSet" and old is not None and old["spec"] != manifest["spec"]:
            return _no("spec.replicatedJobs: Invalid value: field is immutable")
        if "--dry-run=server" not in words and old is None:
            objects[f"{kind}/{named}"] = manifest
        return 0
    kind, _, named = words[1].partition("/")
    key = f"{KINDS[kind]}/{named or words[2]}"
    if key not in objects:
        return 0 if "--ignore-not-found" in words else _no(f"Error from server (NotFound): {key} not found")
    if words[0] == "delete":
        del objects[key]
    else:
        print(json.dumps(objects[key]))
    return 0


def _no(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
