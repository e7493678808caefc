"""Asks the API server for Kvoy's resources and the operator whether it is ready; prints both."""

import json
import os
import ssl
import time
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIMIT_S = 120
WANTED = {"llmservices", "llmrouters", "llmrolescalers"}


def served_resources() -> set[str]:
    request = urllib.request.Request("https://kubernetes.default.svc/apis/kvoy.dev/v1alpha1")
    request.add_header("Authorization", "Bearer " + (ACCOUNT / "token").read_text())
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
        return {resource["name"] for resource in json.load(answer)["resources"]}


def readiness() -> str:
    with urllib.request.urlopen(os.environ["OPERATOR"] + "/readyz", timeout=10) as answer:
        return answer.read().decode().strip()


def check() -> None:
    missing = WANTED - served_resources()
    if missing:
        raise OSError(f"the API server does not know {sorted(missing)}")
    print("custom resources are served; the operator answers:", readiness())


deadline = time.monotonic() + LIMIT_S
while True:
    try:
        check()
        break
    except OSError as error:
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT_S} s: {error}") from None
        print("waiting:", error, flush=True)
        time.sleep(2)
