# The end-to-end tests' user: a pod with the official OpenAI client, and nothing of Kvoy.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}
RUN python3 -m venv /opt/client && /opt/client/bin/pip install --no-cache-dir 'openai>=2,<4'
COPY tests/e2e/client.py /opt/client/client.py
USER 65532:65532
ENTRYPOINT ["/opt/client/bin/python", "/opt/client/client.py"]
CMD ["wait"]
