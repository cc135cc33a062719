"""The OpenAI interface over HTTP: routes, requests checked and parsed, answers, metrics and the page."""
