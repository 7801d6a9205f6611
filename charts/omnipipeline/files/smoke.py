"""`helm test`: apply a small CPU pipeline, wait until it is ready, send it a request, delete it.

Runs in the operator's image (it holds Python and the Kubernetes client), with a service account of its own that may do
this and nothing else. Exit code 0 means that the operator, the stage image, DNS, the Service and the stages work.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

from kubernetes import client, config

NAMESPACE, NAME = os.environ["SMOKE_NAMESPACE"], os.environ["SMOKE_NAME"]
DEADLINE = time.monotonic() + float(os.environ["SMOKE_TIMEOUT"])
KIND = {"group": "omnipipeline.dev", "version": "v1alpha1", "namespace": NAMESPACE, "plural": "omnipipelines"}

CODE = """\
import stage_runtime as omni

def split():
    def run(payload):
        for word in payload.request.last_text().split():
            yield omni.Chunk({"word": word})
        yield omni.Result({})
    return run

def shout():
    async def run(session):
        async for chunk in session.chunks():
            yield omni.Chunk(omni.Text(chunk.data["word"].upper() + " "))
    return omni.Streaming(run)
"""
STAGES = [
    {"name": "split", "process": "front", "factory": "smoke:split", "next": ["shout"], "streamTo": ["shout"]},
    {"name": "shout", "process": "voice", "factory": "smoke:shout", "terminal": True},
]


def main() -> int:
    config.load_incluster_config()
    api = client.CustomObjectsApi()
    body = {
        "apiVersion": "omnipipeline.dev/v1alpha1",
        "kind": "OmniPipeline",
        "metadata": {"name": NAME},
        "spec": {"serves": ["chat"], "code": {"inline": {"smoke.py": CODE}}, "stages": STAGES},
    }
    remove(api)
    api.create_namespaced_custom_object(body=body, **KIND)
    try:
        url = ready(api)
        answer = ask(url)
        print(f"{url} answers {answer!r}")
        return 0 if answer.split() == ["IT", "WORKS"] else 1
    finally:
        remove(api)


def remove(api: client.CustomObjectsApi) -> None:
    """Delete the pipeline and wait until it no longer exists."""
    while time.monotonic() < DEADLINE + 30:
        try:
            api.delete_namespaced_custom_object(name=NAME, propagation_policy="Foreground", **KIND)
        except client.ApiException as error:
            if error.status == 404:
                return
            raise
        time.sleep(1)


def ready(api: client.CustomObjectsApi) -> str:
    """The pipeline's URL, once it is Ready."""
    why = "no operator has reconciled it"
    while time.monotonic() < DEADLINE:
        found = api.get_namespaced_custom_object(name=NAME, **KIND)
        status = found.get("status", {})
        for condition in status.get("conditions", ()):
            if condition["type"] == "Ready":
                if condition["status"] == "True":
                    return str(status["endpoint"]["url"])
                why = f"{condition.get('reason')}: {condition.get('message')}"
        time.sleep(1)
    raise SystemExit(f"not ready in time: {why}")


def ask(url: str) -> str:
    """The pipeline's answer; retried, because the Service's rules may follow the condition a moment later."""
    question = {"model": NAME, "messages": [{"role": "user", "content": "it works"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > DEADLINE or isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
