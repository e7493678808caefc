# The end-to-end tests' user: a pod with the official OpenAI client, and nothing of Kvoy.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
RUN python3 -m venv /opt/client \
    && PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
      /opt/client/bin/pip install --quiet --no-cache-dir 'openai>=2,<4'
USER 65532:65532
ENTRYPOINT ["/opt/client/bin/python"]
