# An engine with the timing runner: no torch and no model.
# The base: Python 3.11 or newer with venv, and CA certificates. The official Python image has them;
# Debian has them with python3, python3-venv and ca-certificates.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS tools
# Both installers trust the certificates of the base.
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt UV_SYSTEM_CERTS=1 \
    UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --quiet --no-cache-dir 'uv>=0.9,<1' \
    && python3 -m venv --without-pip /opt/kvoy
WORKDIR /src

# Dependencies are a layer of their own, which stays while they do: what else is in pyproject.toml,
# settings of tools and what only developers need, does not count.
FROM tools AS requirements
COPY pyproject.toml ./
RUN sed -i '/^dev = \[/,/^\]/d; /^\[tool\./,$d' pyproject.toml

FROM tools AS dependencies
COPY --from=requirements /src/pyproject.toml ./
RUN --mount=type=cache,target=/var/cache/uv \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvoy/bin/python \
      --requirements pyproject.toml --extra sim --extra tracing

FROM tools AS code
COPY . .
RUN --mount=type=cache,target=/var/cache/uv \
    /opt/uv/bin/uv pip install --quiet --python /opt/kvoy/bin/python --no-deps .

FROM ${BASE_IMAGE}
RUN groupadd --gid 65532 kvoy \
    && useradd --uid 65532 --gid kvoy --create-home --shell /usr/sbin/nologin kvoy
COPY --from=dependencies /opt/kvoy /opt/kvoy
COPY --from=code /opt/kvoy /opt/kvoy
ARG VERSION
LABEL org.opencontainers.image.title="kvoy-engine-sim" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/kvoy/bin:$PATH
USER 65532:65532
WORKDIR /home/kvoy
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvoy"]
CMD ["serve", "--help"]
