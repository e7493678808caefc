# An engine on NVIDIA GPUs: torch brings the CUDA libraries, the node brings the driver.
# The base: Python 3.11 or newer with venv, and CA certificates. The official Python image has them;
# Debian has them with python3, python3-venv and ca-certificates.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# Dependencies stay as they are while what asks for them does: what else is in pyproject.toml,
# settings of tools and what only developers need, does not count.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /src
COPY pyproject.toml ./
RUN sed -i '/^dev = \[/,/^\]/d; /^\[tool\./,$d' pyproject.toml

FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 65532 kvoy \
    && useradd --uid 65532 --gid kvoy --create-home --shell /usr/sbin/nologin kvoy \
    && python3 -m venv --without-pip /opt/kvoy
WORKDIR /opt/kvoy
COPY --from=requirements /src/pyproject.toml ./
# An index for torch alone, for another CUDA version than the default index has.
ARG TORCH_INDEX=
# The dependencies are gigabytes, so they are installed where they stay and never copied; the
# installer is gone at the end of the step.
RUN --mount=type=cache,target=/var/cache/uv \
    export PIP_CERT=/etc/ssl/certs/ca-certificates.crt UV_SYSTEM_CERTS=1 \
      UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 \
    && python3 -m venv /tmp/uv && /tmp/uv/bin/pip install --quiet --no-cache-dir 'uv>=0.9,<1' \
    && install() { /tmp/uv/bin/uv pip install --quiet --python bin/python "$@"; } \
    && if [ -n "${TORCH_INDEX}" ]; then \
         install --index "${TORCH_INDEX}" "$(sed -n 's/^ *"\(torch[<>=][^"]*\)",$/\1/p' pyproject.toml)"; \
       fi \
    && install --requirements pyproject.toml --extra engine --extra tracing \
    && rm -r /tmp/uv

FROM runtime AS code
RUN python3 -m venv /opt/uv \
    && PIP_CERT=/etc/ssl/certs/ca-certificates.crt /opt/uv/bin/pip install --quiet --no-cache-dir 'uv>=0.9,<1'
WORKDIR /src
COPY . .
# A tree of its own, laid out as /opt/kvoy is.
RUN --mount=type=cache,target=/var/cache/uv \
    UV_SYSTEM_CERTS=1 UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy \
    /opt/uv/bin/uv pip install --quiet --compile-bytecode --python /opt/kvoy/bin/python \
      --prefix /opt/code --no-deps .

FROM runtime
COPY --from=code /opt/code /opt/kvoy
ARG VERSION
LABEL org.opencontainers.image.title="kvoy-engine-cuda" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/kvoy/bin:$PATH
# What NVIDIA's container runtime gives; which devices, the device plugin says.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /home/kvoy
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvoy"]
CMD ["serve", "--help"]
