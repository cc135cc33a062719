"""Ask a server's application without a socket."""

import pickle
from pathlib import Path


def complete(bundle: str | Path, options, prompt: str, tokens: int, step_tokens: int = 256, **more) -> str:
    """The text of a greedy completion by a server of a bundle, which is described as a replica is."""
    from starlette.testclient import TestClient

    from moepack.server.command import Serve, opened, options_of

    command = pickle.loads(pickle.dumps(Serve(str(bundle), options, name="it", step_tokens=step_tokens)))
    body = {"model": "it", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    with opened(command, options_of(command)) as server:
        with TestClient(server.app, "http://localhost") as client:
            client.portal.call(server.start)
            answer = client.post("/v1/completions", json=body)
            server.stop()
        server.close()
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]
